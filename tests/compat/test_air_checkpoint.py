"""``air.Checkpoint``: a dict goes into a folder and comes back equal, and nothing is pickled on the way."""

from __future__ import annotations

import collections
import copy
import enum
import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from ray_lite import train
from ray_lite.air import Checkpoint
from ray_lite.train.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    LegacyAPIError,
)

pytestmark = pytest.mark.filterwarnings("ignore::ray_lite.train.errors.RayLiteDeprecationWarning")

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = st.recursive(keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
values = st.recursive(
    keys,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left, right):
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return left == right


@given(st.dictionaries(hashable, values, max_size=5))
def test_a_dict_comes_back_equal_and_is_left_alone(data):
    before = copy.deepcopy(data)
    checkpoint = Checkpoint.from_dict(data)
    assert same(checkpoint.to_dict(), data)
    assert same(data, before)


@given(
    st_np.arrays(
        dtype=st_np.scalar_dtypes() | st_np.unicode_string_dtypes(max_len=5), shape=st_np.array_shapes(min_dims=0)
    )
)
def test_numpy_arrays_come_back_byte_for_byte(array):
    found = Checkpoint.from_dict({"a": array, "deep": [{"b": array}]}).to_dict()
    assert found["a"].dtype == array.dtype
    assert found["a"].shape == array.shape
    assert found["a"].tobytes() == found["deep"][0]["b"].tobytes() == array.tobytes()


def test_numpy_scalars_stay_numpy_scalars():
    """float64 is a float by inheritance, and would silently become one."""
    found = Checkpoint.from_dict({"x": np.float64(0.5), "n": np.int32(3), "t": np.datetime64("2020-01-01")}).to_dict()
    assert [type(value) for value in found.values()] == [np.float64, np.int32, np.datetime64]
    assert found == {"x": 0.5, "n": 3, "t": np.datetime64("2020-01-01")}


def test_numbers_that_json_has_no_word_for_survive():
    found = Checkpoint.from_dict({"inf": float("inf"), "nan": float("nan"), "zero": -0.0, "big": 10**400}).to_dict()
    assert repr(found) == repr({"inf": float("inf"), "nan": float("nan"), "zero": -0.0, "big": 10**400})


def test_the_state_of_a_model_and_its_optimizer_comes_back():
    """What most dict checkpoints held: an OrderedDict of tensors, integer keys, tuples, None."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = Checkpoint.from_dict(state).to_dict()
    assert all(torch.equal(found["model"][name], value) for name, value in state["model"].items())
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    torch.nn.Linear(3, 2).load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_keep_dtype_shape_and_values(dtype, shape):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    for given_tensor in (tensor, tensor.T if len(shape) == 2 else tensor, tensor.clone().conj()):
        found = Checkpoint.from_dict({"t": given_tensor}).to_dict()["t"]
        assert found.dtype == given_tensor.dtype
        assert torch.equal(found, given_tensor)
        found.zero_()  # memory of its own, which may be written to


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), r"data\['a'\]\[1\] is a builtins.object"),
        ({1, 2}, r"data\['a'\]\[1\] is a builtins.set"),
        (pathlib.Path("x"), r"data\['a'\]\[1\] is a pathlib"),
        (Color.RED, r"data\['a'\]\[1\] is a .*Color"),
        (Point(1, 2), r"data\['a'\]\[1\] is a .*Point"),
        (np.array([object()]), r"data\['a'\]\[1\] is a numpy array of Python objects"),
        ({Color.RED: 1}, r"a key of data\['a'\]\[1\] is a .*Color"),
    ],
)
def test_what_only_a_pickle_could_store_is_refused_with_its_place(value, place):
    with pytest.raises(LegacyAPIError, match=place) as caught:
        Checkpoint.from_dict({"a": [0, value]})
    assert "use Checkpoint.from_directory(folder)" in str(caught.value)


def test_a_dict_that_contains_itself_is_refused():
    data = {}
    data["me"] = data
    with pytest.raises(ConfigError, match="contains itself"):
        Checkpoint.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "x"])
def test_only_a_dict_is_a_dict(data):
    with pytest.raises(ConfigTypeError, match="must be a dict, got"):
        Checkpoint.from_dict(data)


def test_the_folder_goes_with_the_object_and_not_before():
    checkpoint = Checkpoint.from_dict({})
    same_place = Checkpoint.from_checkpoint(checkpoint)
    folder = checkpoint.path
    del checkpoint
    gc.collect()
    assert os.path.isdir(folder)
    assert same_place.to_dict() == {}
    del same_place
    gc.collect()
    assert not os.path.exists(folder)


def test_the_folder_goes_with_the_process():
    code = "from ray_lite.air import Checkpoint; c = Checkpoint.from_dict({}); print(c.path)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not os.path.exists(done.stdout.strip())


def test_the_folder_of_a_killed_process_goes_with_the_next_checkpoint():
    """Workers are killed when their run is over, and state dicts are large."""
    code = "import os; from ray_lite.air import Checkpoint; c = Checkpoint.from_dict({}); print(c.path, flush=True); "
    code += "os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert os.path.isdir(done.stdout.strip())
    Checkpoint.from_dict({})
    assert not os.path.exists(done.stdout.strip())


def test_a_forked_child_leaves_the_folder_to_its_parent():
    """A data loader's worker, for example."""
    code = """
import gc, os
from ray_lite.air import Checkpoint
checkpoint = Checkpoint.from_dict({"a": 1})
pid = os.fork()
if pid == 0:
    del checkpoint
    gc.collect()
    os._exit(0)
os.waitpid(pid, 0)
print(checkpoint.to_dict())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{'a': 1}\n"


def test_a_dict_that_is_refused_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(LegacyAPIError):
        Checkpoint.from_dict({"a": object()})
    gc.collect()
    (base,) = tmp_path.iterdir()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("send", [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy])
def test_a_dict_takes_its_content_along(send):
    """To another machine, where this one's temporary folder is not."""
    checkpoint = Checkpoint.from_dict({"w": b"\x00\xff", "a": np.arange(3)})
    checkpoint.set_metadata({"note": "x"})
    arrived = send(checkpoint)
    del checkpoint
    gc.collect()
    assert type(arrived) is Checkpoint
    assert arrived.to_dict()["w"] == b"\x00\xff"
    assert arrived.get_metadata() == {"note": "x"}


def test_a_folder_is_sent_as_its_place(tmp_path):
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    data = pickle.dumps(Checkpoint.from_directory(tmp_path))
    assert len(data) < 2_000
    assert pickle.loads(data) == train.Checkpoint(tmp_path)


def test_bytes_hold_the_files_of_any_checkpoint(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"123")
    packed = Checkpoint.from_directory(tmp_path).to_bytes()
    arrived = Checkpoint.from_bytes(packed)
    assert arrived.files() == ["sub/a.bin"]
    with arrived.open("sub/a.bin") as file:
        assert file.read() == b"123"


def test_bytes_of_a_pickle_are_not_opened():
    class Trap:
        def __reduce__(self):
            return os.abort, ()

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(LegacyAPIError, match="pickle is not supported"):
            Checkpoint.from_bytes(pickle.dumps(Trap(), protocol))
    with pytest.raises(CheckpointError, match=r"not what Checkpoint.to_bytes\(\) gave"):
        Checkpoint.from_bytes(pickle.dumps(Trap(), 0))


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", ".ray_lite.json"])
def test_bytes_with_a_name_that_leaves_the_folder_are_refused(name):
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(CheckpointError):
        Checkpoint.from_bytes(buffer.getvalue())


def test_a_pickle_of_ray_is_named_and_not_opened(tmp_path):
    (tmp_path / "dict_checkpoint.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(LegacyAPIError, match=r"a pickle, which is not supported.*pickle\.load"):
        Checkpoint.from_directory(tmp_path).to_dict()


def test_a_folder_has_no_dict(tmp_path):
    with pytest.raises(LegacyAPIError, match=r"read its files in checkpoint.as_directory\(\)"):
        Checkpoint.from_directory(tmp_path).to_dict()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other/1", "data": {"dict": []}}',
        '{"format": "ray_lite.air.dict/1", "data": 5}',
        '{"format": "ray_lite.air.dict/1", "data": {"dict": [["a", {"bytes": [0, 99]}]]}}',
        '{"format": "ray_lite.air.dict/1", "data": {"dict": [["a", {"run": "code"}]]}}',
        '{"format": "ray_lite.air.dict/1", "data": {"dict": [["a", {"torch": [0, 0, "load", [1]]}]]}}',
        '{"format": "ray_lite.air.dict/1", "data": {"dict": [["a", {"torch": [0, 0, "float32", [1]]}]]}}',
    ],
)
def test_a_damaged_dict_says_so(text):
    checkpoint = Checkpoint.from_dict({})
    pathlib.Path(checkpoint.path, "dict_checkpoint.json").write_text(text)
    with pytest.raises(CheckpointDamagedError, match="cannot be read"):
        checkpoint.to_dict()


def test_an_array_that_is_a_pickle_is_not_opened(tmp_path):
    checkpoint = Checkpoint.from_dict({})
    with open(pathlib.Path(checkpoint.path, "dict_checkpoint.bin"), "wb") as file:
        np.save(file, np.array([object]), allow_pickle=True)
        size = file.tell()
    text = json.dumps({"format": "ray_lite.air.dict/1", "data": {"dict": [["a", {"numpy": [0, size]}]]}})
    pathlib.Path(checkpoint.path, "dict_checkpoint.json").write_text(text)
    with pytest.raises(CheckpointDamagedError, match="allow_pickle=False"):
        checkpoint.to_dict()


def test_uris_go_both_ways(tmp_path):
    checkpoint = Checkpoint.from_dict({"a": 1})
    target = tmp_path / "target"
    assert checkpoint.to_uri(f"file://{target}") == str(target)
    back = Checkpoint.from_uri(f"file://{target}")
    assert back.to_dict() == {"a": 1}
    assert back.uri == f"file://{target}"
    assert back.get_internal_representation() == ("local_path", str(target))


def test_a_dict_goes_to_any_storage_of_fsspec():
    checkpoint = Checkpoint.from_dict({"a": np.arange(3)})
    checkpoint.set_metadata({"note": "x"})
    uri = "memory://air-checkpoints/one"
    assert checkpoint.to_uri(uri) == uri
    stored = Checkpoint.from_uri(uri)
    assert stored.to_dict()["a"].tolist() == [0, 1, 2]
    assert stored.get_metadata() == {"note": "x"}
    assert stored.uri == uri
    assert stored.get_internal_representation() == ("uri", uri)
    assert Checkpoint.from_bytes(stored.to_bytes()).get_metadata() == {"note": "x"}


def test_it_is_a_train_checkpoint(tmp_path):
    checkpoint = Checkpoint.from_directory(tmp_path)
    assert isinstance(checkpoint, train.Checkpoint)
    assert checkpoint == train.Checkpoint(tmp_path)
    assert Checkpoint.from_checkpoint(train.Checkpoint(tmp_path)) == checkpoint
    with pytest.raises(ConfigTypeError, match=r"must be a ray_lite.train.Checkpoint, got str"):
        Checkpoint.from_checkpoint(str(tmp_path))


def test_the_new_class_has_none_of_this_and_says_so():
    assert not hasattr(train.Checkpoint, "from_dict")
    with pytest.raises(AttributeError, match="from_directory"):
        train.Checkpoint.from_dict({})


@pytest.mark.parametrize(
    ("name", "args"),
    [("from_object_ref", (1,)), ("to_object_ref", ()), ("get_preprocessor", ()), ("set_preprocessor", (1,))],
)
def test_what_is_not_supported_says_what_to_do(name, args):
    with pytest.raises(LegacyAPIError, match=rf"`ray_lite.air.Checkpoint.{name}` is not supported.*Instead: "):
        getattr(Checkpoint.from_dict({}), name)(*args)
