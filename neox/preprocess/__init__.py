"""Preprocessing of documents to token datasets, on one machine or several.

`_PreprocessRun` in `preprocess_run.py` draws the way from a line of JSON to the files. There are three encoders of
lines: `encode.py` for texts, `chat_encoder.py` for conversations, `preference_encoder.py` for answers in pairs.
"""

from neox.preprocess.preprocess_run import PreprocessReport, check_settings, preprocess
from neox.preprocess.rank_parts import RankInfo, preprocess_on_rank
from neox.preprocess.settings import ChatSettings, PreferenceSettings, PreprocessSettings, TokenizerSpec

__all__ = [
    "ChatSettings",
    "PreferenceSettings",
    "PreprocessReport",
    "PreprocessSettings",
    "RankInfo",
    "TokenizerSpec",
    "check_settings",
    "preprocess",
    "preprocess_on_rank",
]
