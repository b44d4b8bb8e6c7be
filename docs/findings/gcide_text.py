"""Write the dictionary GCIDE as plain prose: one entry per line, in an order that does not follow the alphabet.

python docs/findings/gcide_text.py gcide.dict.dz gcide.txt

The input is usr/share/dictd/gcide.dict.dz of Debian's package dict-gcide 0.48.5+nmu2. Lines that only name a source,
such as `[1913 Webster]`, and line breaks within an entry leave. Entries are sorted by SHA-256, so that training and
validation text hold words of all letters; an entry that occurs twice is kept once.
"""

import gzip
import hashlib
import re
import sys

SOURCE_LINE = re.compile(r"^\s*\[[^\]\n]{1,60}\]$", re.MULTILINE)
ENTRY = re.compile(r"\n\n(?=\S)")


def digest(entry: str) -> bytes:
    return hashlib.sha256(entry.encode()).digest()


with gzip.open(sys.argv[1], "rt", encoding="utf-8", errors="replace") as file:
    dictionary = file.read()
prose = SOURCE_LINE.sub("", dictionary)
entries = {" ".join(entry.split()) for entry in ENTRY.split(prose)}
entries = sorted((entry for entry in entries if len(entry) >= 40), key=digest)
text = "\n".join(entries) + "\n"
with open(sys.argv[2], "w", encoding="utf-8") as file:
    file.write(text)
print(f"{len(entries)} entries, {len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}")
