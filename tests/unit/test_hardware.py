"""Description of the machine, and the most that it can do."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from steptune.tuner import hardware
from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.hardware import (
    allowed_cores,
    check_platform,
    checked_device,
    describe_environment,
    describe_hardware,
    find_compiler,
    free_memory_bytes,
    torch_version,
    usable_cores,
)


class TestPlatform:
    def test_this_one_is_supported(self) -> None:
        check_platform()

    def test_another_system_is_refused_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(PlatformError, match=r"^win32 is not supported: Steptune runs on Linux"):
            check_platform()

    def test_another_python_is_refused_with_the_way_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "version_info", (3, 10, 0))
        with pytest.raises(PlatformError, match=r"is not supported: use Python 3\.11 or 3\.12"):
            check_platform()

    @pytest.mark.parametrize("version", ["2.10.2", "2.14.0", "1.13.1+cu117", "3.0"])
    def test_another_torch_is_refused_with_the_way_out(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(hardware, "torch_version", lambda: version)
        with pytest.raises(PlatformError) as error:
            check_platform()
        assert str(error.value) == f"torch {version} is not supported: install torch >= 2.11, < 2.14"

    @pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1.dev20260101+cu130"])
    def test_supported_torches(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(hardware, "torch_version", lambda: version)
        check_platform()

    def test_without_torch_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        with pytest.raises(PlatformError, match=r"torch is not installed.*pip install 'steptune\[torch\]'"):
            check_platform()

    def test_the_version_is_that_of_torch_itself(self) -> None:
        """Read without importing it."""
        version = torch_version()
        assert version is not None
        assert version.split("+")[0] == torch.__version__.split("+")[0]


class TestCores:
    def test_what_was_noted_before_binding_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STEPTUNE_CORES", "0,2,5")
        assert allowed_cores() == {0, 2, 5}
        assert usable_cores() == 3

    def test_otherwise_it_is_this_process_s_affinity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("STEPTUNE_CORES", raising=False)
        assert allowed_cores() == set(psutil.Process().cpu_affinity())


class TestCompiler:
    @pytest.fixture
    def tools(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A machine whose only programs are those that a test puts there."""
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        return tmp_path

    def program(self, folder: Path, name: str) -> str:
        path = folder / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    def test_none_is_found_where_there_is_none(self, tools: Path) -> None:
        assert find_compiler() is None

    def test_gcc_comes_before_clang(self, tools: Path) -> None:
        clang = self.program(tools, "clang++")
        assert find_compiler() == clang
        assert self.program(tools, "g++") == find_compiler()

    def test_the_user_s_choice_comes_first(self, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program(tools, "g++")
        mine = self.program(tools, "my-compiler")
        monkeypatch.setenv("CXX", "my-compiler")
        assert find_compiler() == mine

    def test_a_choice_that_does_not_exist_is_passed_over(self, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gcc = self.program(tools, "g++")
        monkeypatch.setenv("CXX", "nothing-of-this-name")
        assert find_compiler() == gcc


class TestDescription:
    def test_of_the_processor(self) -> None:
        profile = describe_hardware("cpu")
        assert profile.device_kind == "cpu"
        assert profile.num_cores == usable_cores()
        assert profile.memory_bytes == psutil.virtual_memory().total
        assert profile.versions == {"python": platform.python_version(), "torch": torch.__version__}

    def test_says_nothing_about_who_owns_the_machine(self) -> None:
        import msgspec

        text = msgspec.json.encode(describe_hardware("cpu")).decode()
        assert platform.node() not in text

    def test_is_the_same_every_time(self) -> None:
        assert describe_hardware("cpu").fingerprint == describe_hardware("cpu").fingerprint

    def test_free_memory_is_within_the_machine_s(self) -> None:
        assert 0 < free_memory_bytes() <= psutil.virtual_memory().total

    def test_ceilings_are_positive_and_leave_the_precision_setting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hardware, "_MATRIX_SIZES", {"cpu": (32, 64)})
        monkeypatch.setattr(hardware, "_COPY_BYTES", {"cpu": 1 << 20})
        before = torch.get_float32_matmul_precision()
        environment = describe_environment("cpu", tmp_path)
        rates = environment.calibration.matmul_flops_per_s
        assert set(rates) == {"float32", "bfloat16", "float16"}
        assert min(*rates.values(), environment.calibration.copy_bytes_per_s) > 0
        assert torch.get_float32_matmul_precision() == before
        assert environment.num_ranks == 1
        assert environment.free_disk_bytes > 0


class TestDevice:
    @pytest.mark.parametrize("name", ["cuda:0", "gpu"])
    def test_what_is_no_kind_is_refused_with_those_that_are(self, name: str) -> None:
        with pytest.raises(ChoiceError, match=rf"'{name}': use one of cpu, cuda"):
            checked_device(name)

    def test_a_gpu_that_is_not_here_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ChoiceError, match="no CUDA device here"):
            checked_device("cuda")
        assert checked_device(None) == checked_device("") == "cpu"
