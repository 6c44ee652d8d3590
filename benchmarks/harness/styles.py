"""Colours, lines and marks of the pictures."""

# Ours stands out; the peers keep one muted colour each, distinguishable without colour vision by their
# markers.
STYLES = {
    "logitless": {"color": "#d1495b", "linewidth": 2.6, "marker": "o", "zorder": 3},
    "eager, fp32 upcast": {"color": "#5c6b73", "marker": "s"},
    "torch.compile": {"color": "#2f9e8f", "marker": "v"},
    "Liger": {"color": "#4f8fba", "marker": "^"},
    "TRL ChunkedLogProb": {"color": "#e0a030", "marker": "D"},
    "CCE (filtered)": {"color": "#8d6bb8", "marker": "P"},
    "CCE (exact)": {"color": "#b8a0d4", "marker": "X", "linestyle": "--", "markersize": 4},
    "QuACK": {"color": "#8a5a44", "marker": "*"},
}
STYLES["QuACK, chunks of 8,192"] = STYLES["QuACK"]
NOTE = {"textcoords": "offset points", "fontsize": 10, "color": "#666666"}
# Limits that no implementation can pass.
LIMIT = {"color": "#999999", "linestyle": "--", "linewidth": 1, "zorder": 1}
