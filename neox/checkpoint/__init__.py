"""Weights on disk: layout and names, manifest and commit, safe reading, any tensor-parallel degree."""

from neox.checkpoint.files import WRITE_BYTES
from neox.checkpoint.finding import checkpoint_at, damaged_weights, find_checkpoint, why_not_whole
from neox.checkpoint.gpt_neox_optimizer import WRITER
from neox.checkpoint.identity import check_same_model, identity_state, padding_note
from neox.checkpoint.inference import infer_layer_plan
from neox.checkpoint.inspection import compare_checkpoints, open_checkpoint, summarize, tensor_facts
from neox.checkpoint.manifest import FileRecord, Manifest, check_manifest, read_manifest, record_share
from neox.checkpoint.names import (
    CONFIG,
    LATEST,
    MANIFEST,
    layer_file,
    mp_rank_file,
    parse_step_directory,
    step_directory,
)
from neox.checkpoint.optimizer_forms import ORDER
from neox.checkpoint.optimizer_state import OptimizerReader, saved_layout
from neox.checkpoint.reader import CheckpointReader
from neox.checkpoint.reading import load_file
from neox.checkpoint.resharding import reshard
from neox.checkpoint.retention import keep_last
from neox.checkpoint.staging import (
    checkpoint_directories,
    commit,
    delete_checkpoint,
    discard,
    stage_directory,
    staging_path,
)
from neox.checkpoint.writing import (
    neox_state,
    save_file,
    write_client_state,
    write_config,
    write_full_layer,
    write_layer,
)

__all__ = [
    "CONFIG",
    "LATEST",
    "MANIFEST",
    "ORDER",
    "WRITER",
    "WRITE_BYTES",
    "CheckpointReader",
    "FileRecord",
    "Manifest",
    "OptimizerReader",
    "check_manifest",
    "check_same_model",
    "checkpoint_at",
    "checkpoint_directories",
    "commit",
    "compare_checkpoints",
    "damaged_weights",
    "delete_checkpoint",
    "discard",
    "find_checkpoint",
    "identity_state",
    "infer_layer_plan",
    "keep_last",
    "layer_file",
    "load_file",
    "mp_rank_file",
    "neox_state",
    "open_checkpoint",
    "padding_note",
    "parse_step_directory",
    "read_manifest",
    "record_share",
    "reshard",
    "save_file",
    "saved_layout",
    "stage_directory",
    "staging_path",
    "step_directory",
    "summarize",
    "tensor_facts",
    "why_not_whole",
    "write_client_state",
    "write_config",
    "write_full_layer",
    "write_layer",
]
