// Search in a site that was opened from a folder. Browsers start no worker there, so the search script runs in a hidden
// frame instead, and messages go to and from its window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.loaded = true
        this.waiting.forEach(data => this.postMessage(data))
      }
      this.inside.document.body.appendChild(script)
    }

    postMessage(data) {
      if (this.loaded) {
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      } else {
        this.waiting.push(data)
      }
    }
  }
}
