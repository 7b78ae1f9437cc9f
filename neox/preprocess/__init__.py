"""Preprocessing of documents to token datasets, on one machine or several."""

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
