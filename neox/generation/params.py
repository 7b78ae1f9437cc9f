"""How the next token is chosen, and when a continuation ends."""

from __future__ import annotations

from dataclasses import dataclass

from neox.errors import GenerationError

_COLDEST = 1e-20
"""A temperature as good as 0: the most probable token has all the probability, and float32 overflows dividing by it."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one generation; the defaults are greedy decoding.

    temperature: 0 takes the most probable token (greedy); otherwise logits are divided by it and a token is drawn.
    top_k: draw among the `top_k` most probable tokens; 0 means all.
    top_p: draw among the fewest tokens whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2019,
        arXiv:1904.09751); 0 and 1 mean all.
    repetition_penalty: divides positive and multiplies negative logits of tokens already in the context (CTRL, Keskar
        et al. 2019, arXiv:1909.05858); 1 means none.
    max_new_tokens, min_new_tokens: tokens in the continuation; end-of-document is impossible before the minimum.
    stop: strings that end a continuation; the string itself is not part of the text. Not with beams.
    num_beams: more than 1 searches with that many beams instead of drawing.
    length_penalty: a finished beam's score is its log-probability / length ** length_penalty.
    seed: two runs with one seed draw the same tokens, whatever the batch size.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self._checks() if wrong]
        if problems:
            raise GenerationError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        """Return (is it wrong, what to say) for each rule."""
        return [
            (self.max_new_tokens < 1, f"maximum_tokens is {self.max_new_tokens}: at least 1 token must be asked for"),
            (
                not 0 <= self.min_new_tokens <= self.max_new_tokens,
                f"minimum_tokens is {self.min_new_tokens}: allowed are 0 to maximum_tokens ({self.max_new_tokens})",
            ),
            (not self.temperature >= 0, f"temperature is {self.temperature}: it must be 0 (greedy) or positive"),
            (self.top_k < 0, f"top_k is {self.top_k}: it must be 0 (all tokens) or positive"),
            (not 0 <= self.top_p <= 1, f"top_p is {self.top_p}: it must lie between 0 and 1 (0 and 1: all tokens)"),
            (not self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}: it must be positive"),
            (any(not text for text in self.stop), "an empty stop string would end every continuation at once"),
            (self.num_beams < 1, f"num_beams is {self.num_beams}: it must be at least 1"),
            (
                self.num_beams > 1 and (self.samples or self.top_k > 0 or 0 < self.top_p < 1),
                f"num_beams is {self.num_beams}, temperature {self.temperature}, top_k {self.top_k}, top_p "
                f"{self.top_p}: beams search for the most probable text and draw nothing; set these to 0, or num_beams "
                "to 1",
            ),
            (
                self.num_beams > 1 and bool(self.stop),
                "stop strings and num_beams > 1 do not go together; leave one of them out",
            ),
        ]

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > _COLDEST

    def room(self, prompt: int, context: int) -> int:
        """Return how many tokens may follow a prompt of `prompt` tokens where `context` can be read.

        Raises GenerationError where the prompt is empty or none may.
        """
        if not prompt:
            raise GenerationError("the prompt is empty: there is nothing to continue")
        if prompt >= context:
            raise GenerationError(
                f"the prompt has {prompt} tokens, and this model's context is {context} "
                "(max_position_embeddings): shorten it so that at least one token fits behind it"
            )
        return min(context - prompt, self.max_new_tokens)
