"""What README.md and docs say of measurements: tables, pictures, numbers in sentences, and statements about
other libraries.

Read `numbers.py` first, then `claims.py`.

* `commands.py`: `plot` writes tables and pictures from the newest results; `numbers` lists the
  measured numbers of all pages with their sources. `TABLES` and `ELSEWHERE` name the tables.
* `claims.py`: the sentences with measured numbers, and the result file of each number.
* `peer_claims.py`: statements about other libraries, with the release and the file that shows each.

A measured number in a sentence needs a `Claim` in `claims.py`, a statement about another library a
`PeerClaim` in `peer_claims.py`. A table needs an entry of `TABLES` or `ELSEWHERE`, and markers in its page.
"""
