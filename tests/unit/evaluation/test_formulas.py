"""The published formulas on numbers worked out by hand."""

import math

import pytest

from neox.evaluation.detokenize import detokenize_wikitext
from neox.evaluation.formulas import bits_per_byte, count_words, token_perplexity, word_perplexity


def test_token_perplexity_is_over_the_predicted_tokens():
    assert token_perplexity(30 * math.log(7), 31) == pytest.approx(7)


def test_word_perplexity_spreads_the_same_loss_over_words():
    assert word_perplexity(30 * math.log(7), 31, 16) == pytest.approx(49)


def test_losses_beyond_20_do_not_overflow():
    assert token_perplexity(1e9, 3) == word_perplexity(1e9, 3, 2) == math.exp(20)


def test_bits_per_byte():
    assert bits_per_byte(80 * math.log(2), 40) == pytest.approx(2)


def test_words_are_split_at_single_spaces_of_the_stripped_text():
    assert count_words(" \n a  b\nc d \n") == 4  # "a", "", "b\nc", "d"


@pytest.mark.parametrize(
    ("spaced", "joined"),
    [
        ("Chronicles 3 @.@ 0 , sold 1 @,@ 000 well @-@ made .", "Chronicles 3.0, sold 1,000 well-made ."),
        ("it 's the boys ' game : yes ; no ! what ? done . end", "it's the boys' game: yes; no! what? done. end"),
        ("( lit . Valkyria ) [ 1 ] { x }", "(lit. Valkyria) [1] {x}"),
        ('the " Nameless " unit', 'the "Nameless" unit'),
        (" = = = Plot = = = \n a 40 ° b", " === Plot ===\na 40°b"),
    ],
)  # fmt: skip
def test_wikitext_reads_like_text_again(spaced, joined):
    assert detokenize_wikitext(spaced) == joined
