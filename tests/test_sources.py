"""Operands beside a Dask array are read, joined and copied when the product is computed."""

from __future__ import annotations

import array
import collections
import ctypes
import pickle
import tracemalloc
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import dask
import dask.array as da
import h5py
import netCDF4
import numpy as np
import pytest
import xarray
import zarr
from fsspec.implementations.memory import MemoryFileSystem
from small import integers

import multimm
from multimm.errors import (
    ArrayTypeError,
    DTypeError,
    FileFormatError,
    MultimmError,
    ShapeError,
)
from multimm.io import save_array

A, B = integers((40, 60), 1), integers((60, 50), 2)
#: Bytes of an array that nobody copies unseen.
LARGE = 2**26


class Source:
    """What Dask slices and NumPy converts; it counts the elements that are read."""

    def __init__(self, data):
        self.data, self.shape, self.dtype, self.read = data, data.shape, data.dtype, 0

    def __getitem__(self, where):
        part = self.data[where]
        self.read += part.size
        return part

    def __array__(self, dtype=None, copy=None):
        self.read += self.data.size
        return self.data


@pytest.fixture(autouse=True)
def in_this_process():
    with dask.config.set(scheduler="threads"):
        yield


def accelerated(a, b):
    with multimm.accelerate():
        return a @ b if isinstance(a, da.Array) else da.matmul(a, b)


CALLS = {
    "matmul": multimm.matmul,
    "gemm": lambda a, b: multimm.gemm(1, a, b),
    "accelerate": accelerated,
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
@pytest.mark.parametrize("side", "ab")
def test_what_can_be_sliced_is_read_block_by_block(call, side):
    source = Source(A if side == "a" else B)
    lazy = da.from_array(B if side == "a" else A, chunks=20)
    given = (source, lazy) if side == "a" else (lazy, source)
    multimm.plan(*given)
    c = CALLS[call](*given)
    assert isinstance(c, da.Array)
    assert any(layer.startswith("multimm") for layer in c.dask.layers)
    assert source.read == 0
    np.testing.assert_array_equal(c.compute(), A @ B)
    assert source.read == source.data.size


@calls
def test_shapes_and_chunks_of_numpy_integers(call):
    source = Source(A)
    source.shape, source.chunks = tuple(map(np.int64, A.shape)), (np.int32(20), np.int32(30))
    c = CALLS[call](source, da.from_array(B, chunks=20))
    assert source.read == 0
    np.testing.assert_array_equal(c.compute(), A @ B)


@pytest.mark.parametrize("call", [multimm.matmul, CALLS["gemm"], multimm.plan])
def test_texts_and_lists_of_any_length_in_files_are_refused_at_the_call(tmp_path, call):
    texts = zarr.create_array(tmp_path / "x.zarr", shape=(4, 60), dtype=str, chunks=(2, 60))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        lists = file.create_dataset("lists", (4, 60), h5py.vlen_dtype("i4"))
        strings = file.create_dataset("strings", (4, 60), h5py.string_dtype())
        for given in (texts, lists, strings):
            with pytest.raises(DTypeError, match="a has dtype"):
                call(given, da.from_array(B, chunks=20))
        with multimm.accelerate() as report:
            product = lists @ da.from_array(B, chunks=20)
    assert product.dtype == object  # Dask's, whatever that is
    assert not report.taken


@pytest.mark.parametrize("call", [multimm.matmul, CALLS["gemm"], multimm.plan])
def test_what_reads_sparse_parts_is_refused_at_the_call(call):
    """As the matrices of anndata's files do."""
    csr = pytest.importorskip("scipy.sparse").csr_array

    class Backed(Source):
        def __getitem__(self, where):
            return csr(super().__getitem__(where))

    with pytest.raises(ArrayTypeError, match=r"csr_array: .* pass it\.toarray\(\)$"):
        call(Backed(A), da.from_array(B, chunks=20))


def test_an_added_matrix_is_not_read_at_the_call():
    source = Source(A @ B)
    c = multimm.gemm(1, da.from_array(A, chunks=20), B, 2, source)
    assert source.read == 0
    np.testing.assert_array_equal(c.compute(), 3 * (A @ B))


def test_without_a_dask_array_all_is_computed_at_once():
    for product in (multimm.matmul(Source(A), B), multimm.gemm(1, A, Source(B))):
        assert type(product) is np.ndarray
        np.testing.assert_array_equal(product, A @ B)
    assert multimm.verify(Source(A), Source(B), Source(A @ B))


def hdf5(folder, x):
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("of/x", data=x, chunks=(20, 25))
    return h5py.File(folder / "x.h5")["of/x"]


def zarr_array(folder, x):
    made = zarr.open(folder / "x.zarr", mode="w", shape=x.shape, chunks=(20, 25), dtype=x.dtype)
    made[:] = x
    return made


def netcdf(folder, x, **packed):
    with netCDF4.Dataset(folder / "x.nc", "w") as file:
        for name, size in zip("rc", x.shape, strict=True):
            file.createDimension(name, size)
        variable = file.createVariable("x", "i2" if packed else x.dtype, ("r", "c"), fill_value=-99)
        variable.setncatts(packed)
        variable[:] = x
    return netCDF4.Dataset(folder / "x.nc")["x"]


def packed_netcdf(folder, x):
    return netcdf(folder, x, scale_factor=0.5)


def lazy_xarray(folder, x):
    xarray = pytest.importorskip("xarray")
    netcdf(folder, x)
    return xarray.open_dataset(folder / "x.nc", engine="netcdf4")["x"]


@pytest.mark.parametrize("kind", [hdf5, zarr_array, netcdf, packed_netcdf, lazy_xarray])
def test_arrays_of_files_that_others_have_opened(tmp_path, kind):
    source = kind(tmp_path, B)
    c = multimm.matmul(da.from_array(A, chunks=20), source)
    np.testing.assert_array_equal(c.compute(), A @ B)
    elsewhere = pickle.loads(pickle.dumps(c))  # as a worker gets it
    np.testing.assert_array_equal(elsewhere.compute(), A @ B)
    save_array(source, tmp_path / "saved.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "saved.npy"), B)
    np.testing.assert_array_equal(multimm.matmul(A, source), A @ B)


def test_missing_elements_are_no_numbers(tmp_path):
    source = netcdf(tmp_path, np.where(B == 0, -99, B))
    with pytest.raises(ArrayTypeError, match=r"numpy\.ma\.filled"):
        multimm.matmul(da.from_array(A, chunks=20), source).compute()
    with pytest.raises(ArrayTypeError, match="filled"):
        multimm.matmul(A, source)


@pytest.fixture
def computed():
    return []


@pytest.fixture
def rows(computed):
    def touch(block):
        computed.append(block.shape)
        return block

    return [da.from_array(row, chunks=20).map_blocks(touch, meta=np.empty(0, "f4")) for row in A]


@calls
@pytest.mark.parametrize(
    "as_given",
    [list, tuple, lambda rows: [rows[:20], rows[20:]], collections.deque, collections.UserList],
)
def test_lists_of_dask_arrays_are_stacked_and_not_computed(call, as_given, rows, computed):
    given = as_given(rows)
    if isinstance(given[0], list):  # a stack of two
        right, lazy = np.stack([A[:20], A[20:]]) @ B, da.from_array(B, chunks=20)
        if call == "gemm":
            return
    else:
        right, lazy = A @ B, da.from_array(B, chunks=20)
    multimm.plan(given, lazy)
    c = CALLS[call](given, lazy)
    assert not computed
    np.testing.assert_array_equal(c.compute(), right)


def test_lists_alone_are_lazy_as_well(rows, computed, tmp_path):
    for c, right in (
        (multimm.matmul(rows, B), A @ B),
        (multimm.transpose(rows), A.T),
        (multimm.matmul([*rows[:-1], A[-1]], B), A @ B),
        (multimm.gemm(1, A, B, 1, [da.from_array(row, chunks=25) for row in A @ B]), 2 * (A @ B)),
    ):
        assert isinstance(c, da.Array)
        assert not computed
        np.testing.assert_array_equal(c.compute(), right)
        computed.clear()
    assert multimm.verify(rows, B, A @ B)
    save_array(rows, tmp_path / "a.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), A)


def test_lists_of_what_can_be_sliced(rows):
    sources = [Source(row) for row in A]
    c = multimm.matmul(sources, da.from_array(B, chunks=20))
    assert not any(source.read for source in sources)
    np.testing.assert_array_equal(c.compute(), A @ B)
    np.testing.assert_array_equal(multimm.matmul([Source(A)], B)[0], A @ B)


def test_lists_that_cannot_be_used_are_refused_in_one_line(rows, computed):
    objects = np.empty(A.shape, object)
    objects.fill(rows[0])
    delayed = [dask.delayed(row) for row in A]
    masked = [np.ma.masked_less(row, 0) for row in A]
    for given, error, said in (
        ([*rows, rows[0][:7]], ShapeError, "do not stack"),
        (delayed, ArrayTypeError, "from_delayed"),
        (dask.delayed(A), ArrayTypeError, "from_delayed"),
        ([*rows[:-1], delayed[-1]], ArrayTypeError, "from_delayed"),
        (masked, ArrayTypeError, "masked"),
        (objects, DTypeError, "object"),
        (["text", rows[0]], MultimmError, "str"),
    ):
        for call in (multimm.matmul, multimm.plan, CALLS["gemm"]):
            for other in (B, da.from_array(B, chunks=20)):
                with pytest.raises(error, match=said) as info:
                    call(given, other)
                assert "\n" not in str(info.value)
    assert not computed


NUMBERS = np.arange(6.0)


@pytest.mark.parametrize(
    "given",
    [
        array.array("d", NUMBERS),
        array.array("d"),
        memoryview(NUMBERS.reshape(2, 3)),
        memoryview(NUMBERS.reshape(3, 2).T)[::1],
        memoryview(b"abc"),
        bytearray(b"abc"),
        range(6),
        collections.deque(NUMBERS),
        (ctypes.c_double * 3 * 2)((1, 2, 3), (4, 5, 6)),
        SimpleNamespace(__array_interface__=NUMBERS.__array_interface__),
    ],
    ids=lambda given: type(given).__name__,
)
def test_whatever_numpy_makes_numbers_of_is_an_operand(given, tmp_path):
    made = np.asarray(given)
    other = np.arange(2 * made.shape[-1]).reshape(-1, 2)
    for b in (other, da.from_array(other, chunks=2)):
        c = multimm.matmul(given, b)
        assert c.dtype == (made @ other).dtype
        np.testing.assert_array_equal(c, made @ other)
        np.testing.assert_array_equal(multimm.inner(b.T, given), np.inner(other.T, made))
        assert multimm.verify(given, b, made @ other)
    save_array(given, tmp_path / "a.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), made)


@pytest.mark.parametrize(
    "given",
    [None, b"abc", memoryview(b"abc").cast("c"), {1, 2}, Decimal(1), (i for i in range(3))],
    ids=lambda given: type(given).__name__,
)
def test_what_numpy_makes_no_numbers_of_is_named(given):
    for b in (B, da.from_array(B, chunks=20)):
        with pytest.raises(ArrayTypeError, match=type(given).__name__) as info:
            multimm.matmul(given, b)
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("reason", [TypeError, RuntimeError])
def test_what_numpy_makes_no_array_of_is_refused_in_one_line(reason):
    # As a Dataset of xarray does, and a tensor of PyTorch with a gradient, or on a GPU.
    class Held:
        def __array__(self, dtype=None, copy=None):
            raise reason("call .values\nbefore")

    for given in Held(), [Held()]:
        for call in (multimm.matmul, multimm.plan, multimm.tensordot):
            for other in (B, da.from_array(B, chunks=20)):
                with pytest.raises(ArrayTypeError, match=r"call \.values before") as info:
                    call(given, other)
                assert "\n" not in str(info.value)


def test_units_are_not_dropped():
    class Quantity:
        """As pint's: numbers with a unit, and arithmetic of its own."""

        shape, dtype, ndim = A.shape, A.dtype, 2

        def __array__(self, dtype=None, copy=None):
            return A

        def __array_function__(self, *_):
            raise AssertionError("nobody asks for it")

    for other in (B, da.from_array(B, chunks=20)):
        with pytest.raises(ArrayTypeError, match="Quantity"):
            multimm.matmul(Quantity(), other)
        with pytest.raises(ArrayTypeError, match="Quantity"):
            multimm.gemm(1, A, B, 1, [Quantity()] * 2)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("call", ["matmul", "gemm", "c", "plan", "accelerate", "verify", "save"])
def test_large_arrays_are_not_copied_at_the_call(tmp_path, call, mapped):
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "f4", (LARGE // 512, 128))
    x = np.load(tmp_path / "x.npy", mmap_mode="r") if mapped else np.zeros(x.shape, "f4")
    w = da.ones((128, 2), chunks=64, dtype="f4")
    both = da.zeros((len(x), 8), chunks=-1, dtype="f4"), da.zeros((8, 128), chunks=-1, dtype="f4")
    tracemalloc.start()
    try:
        if call in CALLS:
            CALLS[call](x, w)
        elif call == "c":
            multimm.gemm(1, *both, 1, x)
        elif call == "plan":
            multimm.plan(x, w)
        elif call == "verify":
            from multimm.checks.operands import as_blocks

            as_blocks(x, "a")
        else:
            from multimm.io import Output

            with Output(tmp_path / "c.npy") as output:
                output.store(x)
        assert tracemalloc.get_traced_memory()[1] < LARGE / 8
    finally:
        tracemalloc.stop()


def test_a_large_array_is_multiplied_where_it_is():
    x = np.arange(LARGE // 8, dtype="f8").reshape(-1, 128) % 7
    c = multimm.matmul(x.T, da.from_array(x, chunks=(4096, 128)))
    np.testing.assert_array_equal(c.compute(), x.T @ x)
    assert multimm.matmul(x, da.ones((128, 1))).name != multimm.matmul(x, da.ones((128, 1))).name


def test_small_arrays_may_change_after_the_call_and_give_the_same_keys():
    a, b = A.copy(), da.from_array(B, chunks=20)
    c = multimm.matmul(a, b)
    assert c.name == multimm.matmul(a, b).name
    a[:] = 0
    np.testing.assert_array_equal(c.compute(), A @ B)


@pytest.mark.parametrize("kind", [hdf5, netcdf, packed_netcdf])
@pytest.mark.parametrize("travels", [False, True])
def test_a_file_that_its_user_closes_before_the_product_is_computed(tmp_path, kind, travels):
    source = kind(tmp_path, B)
    c = multimm.matmul(da.from_array(A, chunks=20), source)
    (source.file if kind is hdf5 else source.group()).close()
    if travels:
        c = pickle.loads(pickle.dumps(c))
    np.testing.assert_array_equal(c.compute(), A @ B)
    for path in tmp_path.glob("x.*"):
        path.unlink()
    with pytest.raises(FileFormatError, match=r"/x\.(h5|nc): .*x, an operand, cannot be read"):
        c.compute()


def hdf5_in_memory(folder, x):
    hdf5(folder, x).file.close()
    return h5py.File(BytesIO((folder / "x.h5").read_bytes()))["of/x"]


def hdf5_being_written(folder, x):
    return h5py.File(folder / "x.h5", "w").create_dataset("x", data=x)


def netcdf_in_memory(folder, x):
    netcdf(folder, x)
    return netCDF4.Dataset("nowhere.nc", memory=(folder / "x.nc").read_bytes())["x"]


def netcdf_being_written(folder, x):
    netcdf(folder, x).group().close()
    return netCDF4.Dataset(folder / "x.nc", "a")["x"]


def zarr_in_memory(folder, x):
    return zarr.create_array(f"memory://{folder.name}.zarr", data=x, chunks=(20, 25))


def zarr_in_wrapped_memory(folder, x):
    below = zarr.storage.FsspecStore.from_url(f"memory://{folder.name}.zarr")
    store = zarr.storage.WrapperStore(below)
    return zarr.create_array(store, data=x, chunks=(20, 25))


def zarr_being_zipped(folder, x):
    return zarr.create_array(zarr.storage.ZipStore(folder / "x.zip", mode="w"), data=x)


def gone(source):
    """As for another process, which has neither that memory nor the lock of the file."""
    if isinstance(source, zarr.Array):
        MemoryFileSystem.store.clear()
    else:
        (source.group() if hasattr(source, "group") else source.file).close()


@pytest.mark.parametrize(
    "kind",
    [
        hdf5_in_memory,
        hdf5_being_written,
        netcdf_in_memory,
        netcdf_being_written,
        zarr_in_memory,
        zarr_in_wrapped_memory,
        zarr_being_zipped,
    ],
)
def test_what_no_other_process_can_open_is_read_before_it_travels(tmp_path, kind):
    source = kind(tmp_path, B)
    c = multimm.matmul(da.from_array(A, chunks=20), source)
    np.testing.assert_array_equal(c.compute(), A @ B)
    elsewhere = pickle.loads(pickle.dumps(c))
    gone(source)
    for path in tmp_path.glob("x.*"):
        path.unlink()
    np.testing.assert_array_equal(elsewhere.compute(), A @ B)


def test_views_of_a_file_travel(tmp_path):
    source = hdf5(tmp_path, B).astype("f4")
    c = multimm.matmul(da.from_array(A, chunks=20), source)
    elsewhere = pickle.loads(pickle.dumps(c))
    np.testing.assert_array_equal(elsewhere.compute(), A @ B.astype("f4"))


def zarr_in_a_folder(x):
    return zarr.create_array("x.zarr", data=x, chunks=(20, 25))


def zarr_in_a_wrapped_folder(x):
    store = zarr.storage.WrapperStore(zarr.storage.LocalStore("x.zarr"))
    return zarr.create_array(store, data=x, chunks=(20, 25))


def zipped_zarr(x):
    with zarr.storage.ZipStore("x.zip", mode="w") as store:
        zarr.create_array(store, data=x)
    return zarr.open_array(zarr.storage.ZipStore("x.zip", mode="r"))


def lazy_xarray(x):
    xarray.DataArray(x, dims=("k", "n"), name="x").to_dataset().to_zarr("x.zarr", zarr_format=2)
    return xarray.open_zarr("x.zarr", chunks=None)["x"]


class HeldBesideAPath:
    """An array, and a path that nothing is read from."""

    def __init__(self, x):
        self.x, self.path, self.shape, self.dtype, self.ndim = x, Path("x"), x.shape, x.dtype, 2

    def __getitem__(self, where):
        return self.x[where]


@pytest.mark.parametrize(
    "kind",
    [zarr_in_a_folder, zarr_in_a_wrapped_folder, zipped_zarr, lazy_xarray, HeldBesideAPath],
)
def test_files_are_found_by_workers_in_another_folder(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    c = multimm.matmul(da.from_array(A, chunks=20), kind(B))
    pickled = pickle.dumps(c)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    np.testing.assert_array_equal(pickle.loads(pickled).compute(), A @ B)
