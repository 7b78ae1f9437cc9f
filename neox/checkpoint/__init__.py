"""Checkpoints on disk: names, atomic saves, manifests, safe reading at any parallel degrees, and tools."""

from neox.checkpoint.chat_template import (
    find_chat_template,
    saved_chat_template,
    write_chat_template,
)
from neox.checkpoint.derived.averaging import average_checkpoints, checkpoint_weights, last_checkpoints
from neox.checkpoint.derived.resizing import (
    VocabularySize,
    mean_of_all,
    mean_of_pieces,
    resize_vocabulary,
    rows_of_file,
)
from neox.checkpoint.derived.rewriting import reshard
from neox.checkpoint.derived.upcycling import upcycle
from neox.checkpoint.generation_settings import (
    add_end_ids,
    find_generation_settings,
    saved_generation_settings,
    write_generation_settings,
)
from neox.checkpoint.gpt_neox.optimizer_state import WRITER
from neox.checkpoint.identity import (
    check_same_model,
    check_trained_model,
    check_vocabulary,
    identity_state,
    padding_note,
)
from neox.checkpoint.inspection import compare_checkpoints, open_checkpoint, summarize, tensor_stats
from neox.checkpoint.optimizer.file_formats import ORDER
from neox.checkpoint.optimizer.state_reader import OptimizerReader, saved_layout
from neox.checkpoint.remote.fetching import checkpoint_at
from neox.checkpoint.save_directory.retention import keep_last
from neox.checkpoint.save_directory.staging import (
    commit,
    delete_checkpoint,
    discard,
    recover_replaced,
    refuse_running,
    stage_directory,
    staging_path,
)
from neox.checkpoint.save_directory.superseded import SUPERSEDED, supersede_after, supersede_all
from neox.checkpoint.weights.averaged_files import LoadedWeights, Parts
from neox.checkpoint.weights.fitting import why_unfit
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint.weights.tensor_files import (
    WRITE_BYTES,
    load_file,
    neox_state,
    save_file,
    write_client_state,
    write_config,
    write_full_layer,
    write_layer,
    write_run,
)
from neox.checkpoint_files.contents import damaged_weights, why_incomplete
from neox.checkpoint_files.finding import checkpoint_directories, find_checkpoint, with_steps
from neox.checkpoint_files.manifest import (
    FileRecord,
    Manifest,
    check_manifest,
    hash_of_weights,
    read_manifest,
    record_share,
)
from neox.checkpoint_files.names import (
    AVERAGED_STEPS,
    CONFIG,
    LAST_LOSSES,
    LEDGER,
    REFERENCE,
    REFERENCE_FROM,
    ROWS,
    SKIPPED,
    averaged_file,
    layer_file,
    mp_rank_file,
)

__all__ = [
    "upcycle",
    "rows_of_file",
    "resize_vocabulary",
    "mean_of_pieces",
    "mean_of_all",
    "check_vocabulary",
    "VocabularySize",
    "AVERAGED_STEPS",
    "CONFIG",
    "LAST_LOSSES",
    "LEDGER",
    "REFERENCE",
    "REFERENCE_FROM",
    "ROWS",
    "SKIPPED",
    "ORDER",
    "SUPERSEDED",
    "WRITER",
    "WRITE_BYTES",
    "CheckpointReader",
    "FileRecord",
    "LoadedWeights",
    "Manifest",
    "OptimizerReader",
    "Parts",
    "add_end_ids",
    "average_checkpoints",
    "averaged_file",
    "check_manifest",
    "check_same_model",
    "check_trained_model",
    "checkpoint_at",
    "checkpoint_directories",
    "checkpoint_weights",
    "commit",
    "compare_checkpoints",
    "damaged_weights",
    "delete_checkpoint",
    "discard",
    "find_chat_template",
    "find_checkpoint",
    "find_generation_settings",
    "hash_of_weights",
    "identity_state",
    "keep_last",
    "last_checkpoints",
    "layer_file",
    "load_file",
    "mp_rank_file",
    "neox_state",
    "open_checkpoint",
    "padding_note",
    "read_manifest",
    "record_share",
    "recover_replaced",
    "refuse_running",
    "reshard",
    "save_file",
    "saved_chat_template",
    "saved_generation_settings",
    "saved_layout",
    "stage_directory",
    "staging_path",
    "summarize",
    "supersede_after",
    "supersede_all",
    "tensor_stats",
    "why_incomplete",
    "why_unfit",
    "with_steps",
    "write_chat_template",
    "write_client_state",
    "write_config",
    "write_generation_settings",
    "write_full_layer",
    "write_layer",
    "write_run",
]
