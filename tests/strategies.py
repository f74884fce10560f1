"""Random texts in many scripts, for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

# Stretches where careless cutting shows: combining marks, jamo, conjuncts, flags, joiners, CRLF.
PIECES = (
    "The quick brown fox",
    " jumps over 42 lazy dogs.",
    "naïve café",
    "e\u0301\u0323o\u0308",
    "Привет, мир! ",
    "Ελληνικά; ",
    "العربية مُحَمَّد",
    "שָׁלוֹם",
    "你好，世界。",
    "寿司を食べます。",
    "カタカナ",
    "한국어 ",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "नमस्ते",
    "क्ष्म्य",
    "ক্ষ",
    "മലയാളം",
    "ภาษาไทย",
    "ខ្មែរ",
    "မြန်မာ",
    "👩‍👩‍👧‍👦",
    "🇫🇷🇩🇪🇯🇵",
    "👍🏽",
    "❤️",
    "🙂",
    "𝒳𐍈",
    "\r\n",
    "\n\n",
    "\n",
    "\t",
    "    ",
    " ",
    "x = {'a': [1, 2]}\n",
    "    return f(x)\n",
    '<tag attr="1">',
)
# fmt: off
WORDS = (
    "the", "key", "to", "cellar", "lies", "under", "third", "stone", "of", "garden", "wall",
    "Fuel", "Dilution", "was", "найден", "лиса", "狐狸。", "寿司", "🙂", "café", "नमस्ते",
)
# fmt: on
# Loose code points that join with whatever stands beside them.
JOINERS = (
    "a \n\r\u0301\u0308\u200d\u200c\ufe0f\u0600\u06dd"
    "\u1100\u1161\u11a8\uac00\uac01\u0915\u094d\u093c\u093e\u0937\u0995\u09cd\u0d15\u0d4d"
    "\u1780\u17d2\u1000\u1039\U0001f1e6\U0001f1e7\U0001f469\U0001f3fd\u2764\u4f60\u3042\u3099"
)

loose_characters = st.text(alphabet=st.sampled_from(JOINERS), max_size=12)
any_characters = st.text(alphabet=st.characters(codec="utf-8"), max_size=8)


def texts(min_pieces: int = 0, max_pieces: int = 16) -> st.SearchStrategy[str]:
    """Texts made of known stretches, loose joining code points and anything UTF-8 can write."""
    piece = st.one_of(st.sampled_from(PIECES), loose_characters, any_characters)
    return st.lists(piece, min_size=min_pieces, max_size=max_pieces).map("".join)
