"""Step `clean`: repair of characters, language, length, and optional rules of quality."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from neox.errors import ConfigError, DataError
from tools.web_text.documents import document_step
from tools.web_text.rules import c4_lines, gopher_quality, gopher_repetition, old_fix, word_pattern
from tools.web_text.step import DocumentFunction, Outcome, Record, Settings

Fix = Literal["remove_512", "remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning"]
Rules = Literal["gopher-quality", "gopher-repetition", "c4"]
_DETECTED_CHARS = 1000
_COUNTED_CHARS = 16384
_TOO_FEW = "too few tokens"


class CleanSettings(Settings):
    """Repair texts, and drop texts that are in other languages, too short, or break a rule.

    The order is: ftfy, number of tokens, language, fixes, rules, number of tokens that is left. Dropped documents are
    written, too, each with the reason.
    """

    ftfy: bool = True
    """Whether to repair broken Unicode with ftfy. Punctuation, quotes, ligatures and entities stay as they are."""

    language: str = "en"
    """ISO 639-1 code of the language to keep; `any` keeps all."""

    detector: Literal["lingua", "fasttext"] = "lingua"
    """Library that detects the language, from the first 1,000 characters."""

    fasttext_model: Path | None = None
    """fastText's model, with labels `__label__CODE`."""

    min_confidence: float = Field(0.5, ge=0, le=1)
    """Least probability of the language."""

    fixes: tuple[Fix, ...] = ()
    """Tasks of OpenWebText's recipe, in the order given."""

    rules: tuple[Rules, ...] = ()
    """Rules of quality: Gopher's two sets, or C4's, which also removes lines."""

    stop_words: Path | None = None
    """File with stop words, one on each line, of which `gopher-quality` wants two in a text. The default is Gopher's
    list, which is English; with another `language` than `en` or `any` the rule needs a list."""

    bad_words: Path | None = None
    """File with a word or phrase on each line; a text that contains one is dropped, as in C4."""

    min_tokens: int = Field(128, ge=0)
    """Fewest tokens of a text."""

    tokenizer: Path | None = None
    """`tokenizer.json` to count tokens with. The default counts the pieces into which GPT-2 cuts a text before merging
    bytes. A piece is at least one token, and three characters of Chinese or Japanese count as one, so no text is
    kept that has fewer of GPT-2's tokens."""

    @model_validator(mode="after")
    def _detector_has_model(self) -> CleanSettings:
        if (self.detector == "fasttext") != (self.fasttext_model is not None):
            raise ValueError("detector fasttext and fasttext_model (a file) must be given together")
        return self

    @model_validator(mode="after")
    def _stop_words_are_of_the_language(self) -> CleanSettings:
        if "gopher-quality" in self.rules and self.language not in ("en", "any") and self.stop_words is None:
            raise ValueError(
                f"rules gopher-quality looks for English stop words, and no text in {self.language!r} would be kept: "
                "give stop_words, a file with words of the language"
            )
        if self.stop_words is not None and "gopher-quality" not in self.rules:
            raise ValueError("stop_words is for rules gopher-quality")
        return self


def build_clean(settings: CleanSettings) -> DocumentFunction:
    """Return the function that cleans a document."""
    cleaner = _Cleaner(settings)

    def clean(record: Record) -> list[Outcome]:
        changed: list[str] = []
        text, dropped = cleaner.clean(record["text"], changed)
        changes = tuple(changed) if dropped is None else ()
        return [Outcome({**record, "text": text}, dropped, changes)]

    return clean


class _Cleaner:
    """Detector, word list and tokenizer of the settings, and the order of the checks."""

    def __init__(self, settings: CleanSettings) -> None:
        self._settings = settings
        self._detect = language_detector(settings)
        self._repair: Callable[[str], str] = str
        self._fix: Callable[[str], str] = str  # ftfy with its defaults, as the old recipe has it
        if settings.ftfy:
            self._repair = _repair()
        if "ftfy_fix_text" in settings.fixes:
            import ftfy

            self._fix = ftfy.fix_text
        self._bad_words = None
        if settings.bad_words is not None:
            self._bad_words = word_pattern(_lines_of(settings.bad_words))
        self._rules: dict[Rules, Callable[[str], tuple[str, str | None]]] = dict(_RULES)
        if settings.stop_words is not None:
            quality = partial(gopher_quality, stop_words=frozenset(_lines_of(settings.stop_words)))
            self._rules["gopher-quality"] = lambda text: (text, quality(text))
        self._count = token_counter(settings)

    def clean(self, text: str, changed: list[str]) -> tuple[str, str | None]:
        """Clean a text.

        Args:
            text: The text.
            changed: List to which the names of changes are added.

        Returns:
            The new text, and why it is dropped, or None.
        """
        settings = self._settings
        if settings.ftfy:
            text = _noted(text, self._repair(text), "ftfy", changed)
        if self._count(text) < settings.min_tokens:
            return text, _TOO_FEW
        counted = text
        if settings.language != "any":
            code, confidence = self._detect(text)
            if code != settings.language:
                return text, f"language: {code}"
            if confidence < settings.min_confidence:
                return text, "language: not sure"
        for name in settings.fixes:
            new, dropped = old_fix(name, text, lambda part: self._detect(part)[0], self._fix)
            if dropped:
                return text, name
            text = _noted(text, new, name, changed)
        for rule in settings.rules:
            new, reason = self._rules[rule](text)
            text = _noted(text, new, "c4: lines removed", changed)
            if reason is not None:
                return text, reason
        if self._bad_words is not None and self._bad_words.search(text) is not None:
            return text, "bad words"
        if text != counted and self._count(text) < settings.min_tokens:
            return text, _TOO_FEW
        return text, None


# Rule -> function that returns the new text, and why the text is dropped, or None.
_RULES: dict[Rules, Callable[[str], tuple[str, str | None]]] = {
    "gopher-quality": lambda text: (text, gopher_quality(text)),
    "gopher-repetition": lambda text: (text, gopher_repetition(text)),
    "c4": c4_lines,
}


def _noted(old: str, new: str, name: str, changed: list[str]) -> str:
    if new != old:
        changed.append(name)
    return new


def _repair() -> Callable[[str], str]:
    """Return ftfy's repair of what was decoded wrongly.

    As in FineWeb, what the author wrote stays: punctuation of full width, curly quotes, ligatures. Entities stay, too,
    because extraction has already read those of the page: `&lt;b&gt;` is what its readers saw.
    """
    import ftfy

    config = ftfy.TextFixerConfig(
        unescape_html=False, fix_latin_ligatures=False, fix_character_width=False, uncurl_quotes=False, explain=False
    )
    return partial(ftfy.fix_text, config=config)


def language_detector(settings: CleanSettings) -> Callable[[str], tuple[str, float]]:
    """Return a function from a text to the code of its language (`?` if unknown) and its probability.

    Raises:
        ConfigError: If the language has no code, or fastText is missing.
        DataError: If the model cannot be read.
    """
    if settings.detector == "fasttext":
        return _fasttext(settings)
    from lingua import IsoCode639_1, Language, LanguageDetectorBuilder

    if settings.language != "any":
        try:
            Language.from_iso_code_639_1(IsoCode639_1.from_str(settings.language))
        except ValueError:
            raise ConfigError(f"language {settings.language!r} is no ISO 639-1 code that lingua knows, as en") from None
    detector = LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()

    def detect(text: str) -> tuple[str, float]:
        text = text[:_DETECTED_CHARS]
        found = detector.detect_language_of(text)
        if found is None:
            return "?", 0.0
        # lingua adds in a varying order, so the last digits vary.
        confidence = round(detector.compute_language_confidence(text, found), 6)
        return found.iso_code_639_1.name.lower(), confidence

    return detect


def _fasttext(settings: CleanSettings) -> Callable[[str], tuple[str, float]]:
    try:
        import fasttext
    except ImportError:
        raise ConfigError("detector fasttext: the package fasttext is missing; pip install fasttext") from None
    try:
        model = fasttext.load_model(str(settings.fasttext_model))
    except ValueError as error:
        raise DataError(f"{settings.fasttext_model} cannot be read: {error}") from None

    def detect(text: str) -> tuple[str, float]:
        line = text[:_DETECTED_CHARS].replace("\n", " ")
        found = model.f.predict(f"{line}\n", 1, 0.0, "strict")  # `model.predict` fails with numpy 2
        if not found:
            return "?", 0.0
        probability, label = found[0]
        return label.removeprefix("__label__"), round(probability, 6)

    return detect


def _lines_of(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return list(filter(None, map(str.strip, text.splitlines())))


def token_counter(settings: CleanSettings) -> Callable[[str], int]:
    """Return a function that counts tokens, exactly below `min_tokens`. Raises DataError for a bad tokenizer."""
    from tokenizers import Tokenizer, pre_tokenizers

    if settings.tokenizer is None:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
        return partial(_count, settings.min_tokens, lambda text: sum(map(_least_tokens, split(text))))
    try:
        tokenizer = Tokenizer.from_file(str(settings.tokenizer))
    except Exception as error:  # the library raises no class of its own
        raise DataError(f"{settings.tokenizer} is no tokenizer.json: {error}") from None
    return partial(_count, settings.min_tokens, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))


def _least_tokens(piece: tuple[str, tuple[int, int]]) -> int:
    """Return the fewest tokens of a piece: one, or one for three characters of scripts without blanks.

    Such a script has no ends of words at which GPT-2 cuts. In a few names of a game GPT-2 has longer tokens.
    """
    bytes_of_piece = len(piece[0])
    start, stop = piece[1]
    if bytes_of_piece < 3 * (stop - start):  # characters of two bytes or fewer
        return 1
    return max(1, (stop - start) // 3)


def _count(enough: int, count: Callable[[str], int], text: str) -> int:
    """Count the start of a text, and the whole only if the start has too few."""
    found = count(text[:_COUNTED_CHARS]) if enough else 0
    if found > enough or len(text) <= _COUNTED_CHARS:
        return found
    return count(text)


CLEAN = document_step(
    "clean", CleanSettings, build_clean, packages=("ftfy", "lingua-language-detector", "regex", "tokenizers")
)
