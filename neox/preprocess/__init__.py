"""Documents to datasets: `preprocess(PreprocessSettings(...))`."""

from neox.preprocess.run import PreprocessReport, preprocess
from neox.preprocess.settings import PreprocessSettings, TokenizerSpec

__all__ = ["PreprocessReport", "PreprocessSettings", "TokenizerSpec", "preprocess"]
