"""Preprocessing of documents to token datasets, in one process tree or on several machines."""

from neox.preprocess.parts import RankInfo, preprocess_on_rank
from neox.preprocess.run import PreprocessReport, preprocess
from neox.preprocess.settings import ChatSettings, PreprocessSettings, TokenizerSpec

__all__ = [
    "ChatSettings",
    "PreprocessReport",
    "PreprocessSettings",
    "RankInfo",
    "TokenizerSpec",
    "preprocess",
    "preprocess_on_rank",
]
