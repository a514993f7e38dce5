"""A GPU that cannot be used is told of."""

import sys
from types import SimpleNamespace

import pytest

from client.models import devices
from client.models.devices import Cuda, choose_device, find_cuda
from client.models.frozen.base import FrozenBase
from server.config.load import ConfigError, parse
from simulations.engines.hardware import available_gpus, resources

NOTHING = Cuda(0, "torch is built without CUDA")
BROKEN = Cuda(0, "the driver is too old", "/dev/nvidia0")
GOOD = Cuda(2, present="/dev/nvidia0")


def test_a_gpu_is_taken_where_it_can_be_and_the_cpu_where_it_is_asked_for():
    assert choose_device("auto", NOTHING) == "cpu"
    assert choose_device("auto", GOOD) == choose_device("cuda", GOOD) == "cuda"
    assert {choose_device("cpu", found) for found in (NOTHING, BROKEN, GOOD)} == {"cpu"}


def test_nothing_goes_to_the_cpu_in_silence():
    with pytest.raises(ValueError, match=r"'cuda'.*built without CUDA.*engine\.device = 'cpu'"):
        choose_device("cuda", NOTHING)
    for asked in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"driver is too old.*engine\.device = 'cpu'"):
            choose_device(asked, BROKEN)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """What torch says on a pretended host with a driver, or without."""

    def says(*, cuda="12.8", devices_found=0, usable=False, warning="", error="", driver=True, visible=None):
        def is_available():
            if warning:
                import warnings

                warnings.warn(warning, stacklevel=1)
            return usable

        def init():
            if error:
                raise RuntimeError(error)

        fake = SimpleNamespace(
            __version__="2.13.0",
            version=SimpleNamespace(cuda=cuda),
            cuda=SimpleNamespace(is_available=is_available, device_count=lambda: devices_found, init=init),
        )
        monkeypatch.setitem(sys.modules, "torch", fake)
        (tmp_path / "nvidia3").touch()  # a container may have one device of several
        monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path if driver else tmp_path / "none")
        monkeypatch.setattr(devices.shutil, "which", lambda name: None)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return find_cuda()

    return says


def test_the_reason_is_what_torch_gives(host):
    assert host(usable=True, devices_found=2).devices == 2
    assert "built without CUDA" in host(cuda=None).reason
    assert "driver on your system is too old" in host(warning="The NVIDIA driver on your system is too old").reason
    assert "No CUDA GPUs are available" in host(error="No CUDA GPUs are available").reason
    assert "finds 0 devices" in host().reason


def test_a_hidden_gpu_is_not_seen(host):
    assert host(driver=True).present
    assert not host(driver=False).present
    for visible in ("", "-1"):
        found = host(visible=visible)
        assert "hides every device" in found.reason
        assert choose_device("auto", found) == "cpu"


def test_a_run_is_refused_before_it_starts_and_the_cpu_needs_no_gpu(monkeypatch):
    from simulations.engines import hardware

    monkeypatch.setattr(hardware, "find_cuda", lambda: BROKEN)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="driver is too old"):
            resources(parse({"engine": {"device": device}}), cores=2)
    assert resources(parse({"engine": {"device": "cpu"}}), cores=2).gpu_share == 0
    monkeypatch.setattr(hardware, "find_cuda", lambda: GOOD)
    assert (available_gpus("auto"), available_gpus("cuda"), available_gpus("cpu")) == (2, 2, 0)


def test_flash_attention_is_refused_where_it_cannot_be(monkeypatch):
    for wrong in ({"precision": "fp32"}, {"precision": "bf16-model", "device": "cpu"}):
        with pytest.raises(ValueError, match=r"needs engine\.precision = 'bf16-model'"):
            FrozenBase.of(attention="flash_attention_2", **wrong)
    base = FrozenBase.of(attention="flash_attention_2", precision="bf16-model")
    monkeypatch.setattr("client.models.frozen.base.choose_device", lambda asked: "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        base.chosen_device()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert base.chosen_device() == "cuda"
    monkeypatch.setattr("client.models.frozen.base.choose_device", lambda asked: "cpu")
    with pytest.raises(ValueError, match="there is no GPU here"):
        base.chosen_device()


def test_eager_attention_which_rounds_by_company_is_no_choice():
    with pytest.raises(ConfigError, match=r"engine\.attention = 'eager'.*'sdpa'"):
        parse({"engine": {"attention": "eager"}})
