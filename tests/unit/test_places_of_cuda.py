"""Where the library names CUDA. Everywhere else the device is DeepSpeed's accelerator, of whatever kind."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"""torch\.cuda|["']cuda["']|is_cuda|\.cuda\(""")
GRAPHS = "CUDA graphs are recorded by torch.cuda alone; has_fast_path('recorded_steps') is asked before"
MEMORY = "the recorder of allocations is that of CUDA's allocator"
PLACES = {
    ("neox/devices/table.py", "DeviceFamily = Literal"): "the kinds of devices",
    ("neox/devices/table.py", "torch_type"): "torch's name of NVIDIA's and AMD's GPUs",
    ("neox/devices/table.py", '"cuda": DeviceKind('): "the row of NVIDIA's GPUs",
    ("neox/plan/layout.py", "family: DeviceFamily"): "the kind of a GPU that nobody describes",
    ("neox/plan/run_plan.py", "workload_on"): "the same",
    ("neox/preflight/checks.py", "usual: DeviceFamily"): "the same",
    ("neox/plan/devices/device.py", "family=family"): "the kind of a GPU that nobody describes",
    ("neox/ops/fast_paths.py", "torch.version.hip"): "torch calls AMD's GPUs cuda as well",
    ("neox/engine/build_engine.py", "get_device_capability"): "fp8 needs NVIDIA's tensor cores of some generation",
    ("neox/engine/build_engine.py", "get_device_name"): "the same, for its message",
    ("neox/features/profiler/run.py", "_ACTIVITIES"): "torch's profiler has an activity for each kind of device",
    ("neox/features/profiler/run.py", '_device == "cuda"'): MEMORY,
    ("neox/features/profiler/run.py", "torch.cuda.memory"): MEMORY,
    ("neox/generation/recorded_step.py", "torch.cuda."): GRAPHS,
    ("neox/launch/hosts/vendors.py", 'torch_field="cuda"'): "the field of torch/version.py in builds for NVIDIA",
    ("neox/launch/hosts/vendors.py", "_BUILD_NAMES"): "names of builds of torch",
    ("neox/launch/hosts/vendors.py", 'family="cuda"'): "the kind of NVIDIA's GPUs",
    ("neox/parallel/rng.py", "get_device_module"): "a comment",
}


def test_each_place_that_names_cuda_has_a_reason():
    unused = set(PLACES)
    unexplained = []
    for path in sorted(ROOT.glob("neox/**/*.py")):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not NAMED.search(line):
                continue
            reasons = {place for place in PLACES if place[0] == name and place[1] in line}
            if not reasons:
                unexplained.append(f"{name}:{number}: {line.strip()}")
            unused -= reasons
    assert not unexplained, "use deepspeed.accelerator (neox.engine.device), torch.get_device_module, or has_fast_path"
    assert not unused
