"""Tokenizers of the library `tokenizers`: from a `tokenizer.json`, GPT-2's files or BERT's vocabulary.

    tokenizer.json            backend: normalizer -> pre_tokenizer -> model -> post_processor
        |  `_setup`           no padding, no truncation; special tokens in a text count, or do not
        |                     before_text, after_text: ids that the post_processor writes around each text (`<s>`)
        v
    tokenizer_config.json     eos_token: the end of a document; bos_token: the first token, if nothing is written
    special_tokens_map.json   the same, of older versions
    generation_config.json    further ids at which generation ends
        |
        v
    encode("To be")           ids between before_text and after_text
    encode_bare               ids of the text alone
    encode_inside             ids after another text: also without the blank before the first word (`_inside`)

`neox.tokenizer.positions` says which of them is meant where. Tokens that only the files next to a `tokenizer.json` name
are written into it by an import (`neox.convert.hf_tokenizer`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from neox.errors import TokenizerError
from neox.files import placeholder_at
from neox.tokenizer.base import END_OF_DOCUMENT, PADDING, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
WHOLE_TOKENIZER = (
    "let it write one file with all tokens, AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY), "
    "and give its tokenizer.json"
)
"""What to do if tokens of a tokenizer stand in several files."""
ADDED_TOKENS_DECODER = "added_tokens_decoder"
"""Key of `tokenizer_config.json`. With it, transformers does not read `special_tokens_map.json`."""
_BERT_END = "[SEP]"
_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", _BERT_END)
"""Tokens that end documents if `tokenizer_config.json` names none: of GPT-NeoX and GPT-2, Llama 2, Llama 3 and BERT."""
_WORD_PIECE = "##"
BERT_UNKNOWN = "[UNK]"
BERT_SPECIALS: Mapping[str, str] = MappingProxyType(
    {
        "pad_token": "[PAD]",
        "unk_token": BERT_UNKNOWN,
        "cls_token": "[CLS]",
        "sep_token": _BERT_END,
        "mask_token": "[MASK]",
    }
)
"""BERT's special tokens by Hugging Face's names, in the order of BERT's vocabularies."""


class HFTokenizer(Tokenizer):
    """Tokenizer of a Hugging Face `tokenizer.json`, such as `20B_tokenizer.json`.

    The `eos_token` of a `tokenizer_config.json` or an older `special_tokens_map.json` in the same directory ends
    documents. Without it the first of `<|endoftext|>`, `</s>` and `<|end_of_text|>` that is in the vocabulary does.
    Generation also ends at each `eos_token_id` of a `generation_config.json` in that directory.

    A literal `<|endoftext|>` in a text becomes the end-of-document id, as in gpt-neox. With `special_in_text=False` all
    special tokens in a text are encoded as ordinary text. Padding and truncation stored in the file are switched off.

    Attributes:
        backend: Tokenizer of the library.
        special_in_text: Whether special tokens in a text are recognized.
        eod_token: Token that ends a document.
    """

    name = "HFTokenizer"

    def __init__(self, path: str | Path, *, special_in_text: bool = True) -> None:
        path = Path(path)
        end_tokens: Sequence[str] = _END_TOKENS
        configured = special_token(path, "eos_token")
        if configured:
            end_tokens = [configured]
        self._setup(tokenizer_backend(path), str(path), end_tokens, special_in_text)
        self.further_end_ids = end_ids_of(generation_config(path), str(path.with_name(GENERATION_CONFIG)))
        first = special_token(path, "bos_token")
        if first:
            self.bos = self.backend.token_to_id(first)

    def _setup(
        self, backend: tokenizers.Tokenizer, origin: str, eod_tokens: Sequence[str], special_in_text: bool
    ) -> None:
        """Set all attributes.

        Args:
            backend: Tokenizer of the library, which is changed.
            origin: Path of the tokenizer, for messages.
            eod_tokens: Tokens that may end documents. The first one in the vocabulary does.
            special_in_text: Whether special tokens in a text are recognized.
        """
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = not special_in_text
        self.backend = backend
        self.special_in_text = special_in_text
        self.vocab_size = _number_of_ids(backend, origin)
        for token in eod_tokens:
            found = backend.token_to_id(token)
            if found is not None:
                self.eod = found
                self.eod_token = token
                break
        else:
            beside = tokens_beside(Path(origin), backend) if Path(origin).name == TOKENIZER_FILE else []
            if set(beside) & set(eod_tokens):
                end = next(token for token in eod_tokens if token in beside)
                raise TokenizerError(
                    f"{origin}: the token that ends documents, {end!r}, is not in it, but in files next to it, where "
                    f"transformers takes it from: {WHOLE_TOKENIZER}"
                )
            raise TokenizerError(
                f"{origin}: the vocabulary has no token that ends a document ({' or '.join(map(repr, eod_tokens))}); "
                f"add one (tools/train_tokenizer.py does), or name it as `eos_token` in a {TOKENIZER_CONFIG} next to a "
                f"{TOKENIZER_FILE}"
            )
        self.pad = backend.token_to_id(PADDING)
        if self.is_bert:  # the samples add [CLS] and [SEP], not the tokenizer
            backend.post_processor = processors.Sequence([])
        self.before_text, self.after_text = _around_text(backend)

    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Add tokens after the vocabulary. They are recognised in every text, whatever `special_in_text` says.

        Tokens that the file has at this place already are left as they are.

        Raises:
            TokenizerError: If a token stands at another place of the vocabulary, or twice in the list.
        """
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = not self.special_in_text
        missing = [token for token in tokens if backend.token_to_id(token) is None]
        if missing:
            self.original_hash = self.content_hash
            vars(self).pop("content_hash")  # cached
            backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in missing])
        size = _number_of_ids(backend, "added_tokens")
        first = size - len(tokens)
        for number, token in enumerate(tokens):
            found = backend.token_to_id(token)
            if found != first + number:
                raise TokenizerError(
                    f"added_tokens: {token!r} is token {found} of the vocabulary already, or stands twice in the list; "
                    "remove it. (Added tokens follow the vocabulary of the file in their order.)"
                )
        self._replace_backend(backend)

    def with_vocabulary(self, size: int) -> HFTokenizer:
        """Return this tokenizer as it was when its vocabulary had only `size` ids.

        Raises:
            TokenizerError: If a later id is not that of an added token, so that texts cannot be encoded without it.
        """
        state = orjson.loads(self.backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
        smaller = copy.copy(self)
        vars(smaller).pop("content_hash", None)
        smaller._replace_backend(self._backend_of(state))
        if smaller.vocab_size != size:
            raise TokenizerError(
                f"the tokenizer has {self.vocab_size} ids, and {smaller.vocab_size} without the tokens that were added "
                f"after the first {size}: its own vocabulary has another size"
            )
        return smaller

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.backend.encode(text).ids

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a text alone."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text that follows another text."""
        return self._inside.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def decode_shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def special_name(self, token: int) -> str | None:
        """Return the text of a special token; None for other tokens."""
        return self._special_names.get(token)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary has none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def word_continuations(self) -> list[bool]:
        """Return, for each id, whether it continues a word: WordPiece's tokens that start with `##` do."""
        continuations = []
        for i in range(self.vocab_size):
            token = self.backend.id_to_token(i) or ""
            continuations.append(token.startswith(_WORD_PIECE))
        return continuations

    @cached_property
    def _special_names(self) -> dict[int, str]:
        added = self.backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        """The tokenizer without what it does at the start of a text only."""
        state = orjson.loads(self.backend.to_str())
        for step in ("normalizer", "pre_tokenizer"):
            state[step] = _without_start(state[step])
        return self._backend_of(state)

    def _backend_of(self, state: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """Return a tokenizer of the library that reads special tokens in a text as this one does."""
        backend = tokenizers.Tokenizer.from_str(orjson.dumps(state).decode())
        backend.encode_special_tokens = not self.special_in_text
        return backend

    def _replace_backend(self, backend: tokenizers.Tokenizer) -> None:
        for cached in ("_inside", "_special_names"):
            vars(self).pop(cached, None)
        self.backend = backend
        self.vocab_size = _number_of_ids(backend, "the changed tokenizer")

    @property
    def is_bert(self) -> bool:
        """Whether the vocabulary is BERT's. Then [SEP] ends documents."""
        return self.eod_token == _BERT_END

    def paired(self) -> tokenizers.Tokenizer:
        """Return BERT's tokenizer in Hugging Face's form, which adds [CLS] and [SEP] to a text or a pair of texts.

        Raises:
            TokenizerError: If the vocabulary lacks one of these tokens.
        """
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        cls = BERT_SPECIALS["cls_token"]
        sep = BERT_SPECIALS["sep_token"]
        ids = {token: backend.token_to_id(token) for token in (cls, sep)}
        if None in ids.values():
            raise TokenizerError(f"the vocabulary lacks {cls} or {sep}; BERT's inputs begin and end with them")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=list(ids.items())
        )
        return backend

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`."""
        return self.backend.to_str()

    def _content(self) -> Any:
        state = orjson.loads(self.backend.to_str())
        for key in ("version", "truncation", "padding"):
            state.pop(key, None)
        return {"tokenizer": state, "eod": self.eod}


class HFGPT2Tokenizer(HFTokenizer):
    """GPT-2's byte-level BPE as in Hugging Face's `GPT2TokenizerFast`.

    A literal `<|endoftext|>` in a text becomes the end-of-document id. `<|padding|>` is added to the vocabulary.
    """

    name = "HFGPT2Tokenizer"

    def __init__(self, path: str | Path, merge_file: str | Path | None = None, *, special_in_text: bool = True) -> None:
        """Read the vocabulary.

        Args:
            path: A `tokenizer.json`, a `vocab.json`, or a directory that holds either `tokenizer.json` or `vocab.json`
                and `merges.txt`.
            merge_file: File `merges.txt` that belongs to a `vocab.json` (default: the one in its directory).
            special_in_text: Whether special tokens in a text are recognized.

        Raises:
            TokenizerError: If a file is missing or unreadable, or the vocabulary has no `<|endoftext|>`.
        """
        path = Path(path)
        own_merges = path.with_name("merges.txt")
        if path.is_dir() and not (path / TOKENIZER_FILE).is_file():
            backend = _byte_level_bpe(path / "vocab.json", path / "merges.txt")
        elif path.is_dir():
            backend = tokenizer_backend(path / TOKENIZER_FILE)
        elif merge_file is not None:
            backend = _byte_level_bpe(path, Path(merge_file))
        elif path.name == "vocab.json" and own_merges.is_file():
            backend = _byte_level_bpe(path, own_merges)
        else:
            backend = tokenizer_backend(path)
        backend.add_special_tokens([END_OF_DOCUMENT, PADDING])
        self._setup(backend, str(path), [END_OF_DOCUMENT], special_in_text)


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's original byte-level BPE from `vocab.json` and `merges.txt`.

    A literal `<|endoftext|>` in a text is encoded as ordinary text, as by OpenAI's encoder and gpt-neox. With
    `special_in_text=True` it becomes the end-of-document id.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path, *, special_in_text: bool = False) -> None:
        backend = _byte_level_bpe(Path(vocab_file), Path(merge_file))
        if special_in_text:
            backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        self._setup(backend, str(vocab_file), [END_OF_DOCUMENT], special_in_text)

    def _content(self) -> Any:
        content = super()._content()
        state = content["tokenizer"]
        # `special_in_text` adds one that is a part of the vocabulary anyway.
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != END_OF_DOCUMENT]
        return content


class WordPieceTokenizer(HFTokenizer):
    """BERT's tokenizer from a `vocab.txt` (one token per line) or a `tokenizer.json`. [SEP] ends documents.

    Each Chinese character is a word. The tokenizer does not add [CLS] and [SEP] to texts; the samples do.
    """

    lowercase: bool

    def __init__(self, path: str | Path, *, special_in_text: bool = False) -> None:
        path = Path(path)
        if path.suffix == ".json":
            backend = tokenizer_backend(path)
        else:
            _check_file(path, "vocabulary file")
            try:
                model = models.WordPiece.from_file(str(path), unk_token=BERT_UNKNOWN, max_input_chars_per_word=200)
            except Exception as error:  # the library raises bare Exception
                raise TokenizerError(f"{path}: not a vocabulary of BERT with one token per line ({error})") from error
            backend = word_piece_backend(model, lowercase=self.lowercase)
            special = [token for token in BERT_SPECIALS.values() if backend.token_to_id(token) is not None]
            if BERT_UNKNOWN not in special:
                raise TokenizerError(f"{path}: the vocabulary has no token {BERT_UNKNOWN!r}; give a vocab.txt of BERT")
            backend.add_special_tokens(special)
        self._setup(backend, str(path), [_BERT_END], special_in_text)


class BertWordPieceLowerCase(WordPieceTokenizer):
    """BERT's uncased tokenizer. Texts are converted to lower case, and accents are removed."""

    name = "BertWordPieceLowerCase"
    lowercase = True


class BertWordPieceCase(WordPieceTokenizer):
    """BERT's cased tokenizer."""

    name = "BertWordPieceCase"
    lowercase = False


def word_piece_backend(model: models.WordPiece, *, lowercase: bool) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer around a WordPiece model."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_WORD_PIECE)
    return backend


def tokenizer_backend(path: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a `tokenizer.json`. Raises TokenizerError if it cannot be read."""
    _check_file(path, "tokenizer file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"{path}: not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read ({error}); "
            "make one with tools/train_tokenizer.py, or give vocab.json and merges.txt to GPT2BPETokenizer"
        ) from error


def _byte_level_bpe(vocab_file: Path, merge_file: Path) -> tokenizers.Tokenizer:
    """Build GPT-2's tokenizer without special tokens, so that a literal `<|endoftext|>` is ordinary text."""
    _check_file(vocab_file, "vocabulary file")
    _check_file(merge_file, "merges file")
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:
        raise TokenizerError(
            f"{vocab_file} and {merge_file}: not a GPT-2 vocabulary (one JSON object, token to id) with its merges "
            f"(two tokens per line): {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        why = "does not exist"
        if path.is_dir():
            why = "is a directory"
        raise TokenizerError(
            f"{what} {path} {why}; set vocab_file (and merge_file for GPT2BPETokenizer) to an existing file, "
            "or make one with tools/train_tokenizer.py"
        )
    if (pointer := placeholder_at(path)) is not None:
        raise TokenizerError(f"{what} {path} is {pointer}")


def tokenizer_config(vocab_file: Path) -> Mapping[str, Any]:
    """Return the content of the `tokenizer_config.json` next to a `tokenizer.json`.

    Returns:
        The content; an empty mapping if there is no such file, or the vocabulary has another name.

    Raises:
        TokenizerError: If the configuration cannot be read.
    """
    return _companion(vocab_file, TOKENIZER_CONFIG)


def generation_config(vocab_file: str | Path) -> Mapping[str, Any]:
    """Return the `generation_config.json` next to a `tokenizer.json`, as `tokenizer_config` does."""
    return _companion(Path(vocab_file), GENERATION_CONFIG)


def end_ids_of(settings: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    """Return the ids that end a generation by the settings of a `generation_config.json`.

    Args:
        settings: Content of the file.
        origin: Its path, for the message.

    Raises:
        TokenizerError: If they name something else than ids.
    """
    found = settings.get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise TokenizerError(f"{origin}: eos_token_id: {found!r}: should be a token id, or a list of some")
    return tuple(number for number in dict.fromkeys(ids) if number >= 0)  # -1 stands for no token


def _companion(vocab_file: Path, name: str) -> Mapping[str, Any]:
    """Return the content of a JSON file next to a `tokenizer.json`, as `tokenizer_config` does."""
    path = vocab_file.parent / name
    if vocab_file.name != TOKENIZER_FILE or not path.is_file():
        return {}
    try:
        config = orjson.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as a JSON object: {error}") from error
    return config


def special_tokens(vocab_file: Path) -> Mapping[str, str]:
    """Return the special tokens by name from the files next to a `tokenizer.json`, as transformers finds them.

    They are the usual ones (`eos_token`), others with names of their own (`image_token`), and those of an object
    `extra_special_tokens`. A `tokenizer_config.json` of an older transformers has no `added_tokens_decoder`: then
    `special_tokens_map.json` goes first.

    Args:
        vocab_file: Path of the `tokenizer.json`.

    Raises:
        TokenizerError: If a file cannot be read.
    """
    files = [tokenizer_config(vocab_file)]
    if ADDED_TOKENS_DECODER not in files[0]:
        files.append(_companion(vocab_file, SPECIAL_TOKENS_MAP))
    tokens: dict[str, str] = {}
    for content in files:
        further = content.get("extra_special_tokens")
        named = {key: value for key, value in content.items() if key.endswith("_token")}
        for key, value in {**(further if isinstance(further, dict) else {}), **named}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def tokens_beside(vocab_file: Path, backend: tokenizers.Tokenizer) -> list[str]:
    """Return tokens that files next to a `tokenizer.json` name, and it lacks; transformers adds them in this order.

    Args:
        vocab_file: Path of the `tokenizer.json`.
        backend: Its tokenizer.

    Raises:
        TokenizerError: If a file cannot be read.
    """
    by_id: dict[str, int] = {}
    for number, token in (tokenizer_config(vocab_file).get(ADDED_TOKENS_DECODER) or {}).items():
        by_id[token["content"] if isinstance(token, dict) else str(token)] = int(number)
    if not by_id:
        by_id = dict(_companion(vocab_file, ADDED_TOKENS))
    names = [*sorted(by_id, key=by_id.__getitem__), *special_tokens(vocab_file).values()]
    return [token for token in dict.fromkeys(names) if backend.token_to_id(token) is None]


def special_token(vocab_file: Path, key: str) -> str | None:
    """Return one of `special_tokens`, such as `eos_token`; None if no file names it."""
    return special_tokens(vocab_file).get(key)


def _number_of_ids(backend: tokenizers.Tokenizer, origin: str) -> int:
    """Return a number that is larger than every id. Ids may have gaps, and then there are fewer tokens than that.

    Args:
        backend: Tokenizer of the library.
        origin: Its file, for messages.

    Raises:
        TokenizerError: If two tokens have one id: the library numbers added tokens by the number of tokens, and ids
            behind a gap may be taken.
    """
    ids = backend.get_vocab().values()
    if len(set(ids)) < len(ids):
        tokens: dict[int, str] = {}
        for token, number in backend.get_vocab().items():
            if number in tokens:
                raise TokenizerError(
                    f"{origin}: {token!r} and {tokens[number]!r} both have id {number}, because the ids of the "
                    "vocabulary have gaps before it; fill the gaps with tokens that do not occur"
                )
            tokens[number] = token
    return max(ids, default=-1) + 1


def _around_text(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer writes before and after each text, whatever texts its vocabulary can hold."""
    of_one_word = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if backend.post_processor is not None:
        of_one_word.post_processor = backend.post_processor
    around = of_one_word.encode("a")
    added = around.special_tokens_mask
    before = len(list(takewhile(bool, added)))
    after = len(list(takewhile(bool, reversed(added[before:]))))
    return tuple(around.ids[:before]), tuple(around.ids[len(around.ids) - after :])


def _without_start(step: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a normalizer or pre-tokenizer, as in `tokenizer.json`, without what it does at the start of a text.

    That is a blank in front of the first word (SentencePiece's `add_dummy_prefix`), or the removal of blanks there.
    """
    if step is None:
        return None
    kind = step["type"]
    if kind == "Sequence":
        members = "normalizers" if "normalizers" in step else "pretokenizers"
        kept = [changed for member in step[members] if (changed := _without_start(member)) is not None]
        return {**step, members: kept}
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**step, "add_prefix_space": False}
    if kind == "Strip":
        return {**step, "strip_left": False}
    return step
