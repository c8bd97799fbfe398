"""Environment variables that user code may see: those that affect computation, and none that may hold a secret or give
access to another service.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.service.secret_names import VARIABLE
from steptune.tuner.emulation import DEVICES_VARIABLE, HOSTS_VARIABLE, NETWORKS_VARIABLE

USER = "steptune"
ALLOWED = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "VIRTUAL_ENV"}
    | {"LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CONDA_PREFIX", "MALLOC_CONF"}
    | {DEVICES_VARIABLE, HOSTS_VARIABLE, NETWORKS_VARIABLE}
)
ALLOWED_PREFIXES = (
    *("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "NUMEXPR_", "MALLOC_"),
    *("TORCH", "PYTORCH_", "TRITON_", "GLOO_", "NCCL_", "RCCL_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "HIP_", "HSA_", "ROCM_", "ROCR_"),
)


def clean_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on the allow list, without any whose name suggests a secret."""
    kept = {
        name: value
        for name, value in inherited.items()
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not VARIABLE.search(name)
    }
    kept.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    return kept | {"USER": USER, "LOGNAME": USER, "PYTHONSAFEPATH": "1"}
