"""Vectors for compiled kernels: sixteen float32 that stay in registers, where a loop would not be compiled to what is fastest.

A kernel is a Python function that ``compiled`` makes fast by Numba; it calls these functions as any others. Arrays are flat, of float32, and their indices are not
checked.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic, models, register_model

from triptych.engine import kernel_cache

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("Numba is told not to compile, by NUMBA_DISABLE_JIT")

F = TypeVar("F", bound=Callable[..., Any])
Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]

cgutils: Any = untyped_cgutils
LANES = 16
_ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Sums are vectorized. Infinities and NaN stay what they are: the engine looks for them."""
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.0)
_ONE = np.float32(1.0)
_SERIES = tuple(
    np.float32(factor)
    for factor in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""Coefficients of Cephes' ``expf``."""


def compiled(function: F, *, any_order: bool = True) -> F:
    """Compile a function. ``any_order``: additions and multiplications may change their order, so that loops are
    vectorized.

    The function calls compiled functions of its own file and of this one alone. Its code is kept by the contents of
    both.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _ANY_ORDER if any_order else False}
    try:
        dispatcher: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory for its cache can be written
        dispatcher = numba.njit(**options)(function)
    else:
        kernel_cache.keep(dispatcher, function, __file__)
    kernel: F = dispatcher
    return kernel


_VECTOR = ir.VectorType(ir.FloatType(), LANES)
"""Vector of as many registers as the processor needs for it."""


class _Lanes(numba.types.Type):
    """Sixteen float32 in registers, which only the functions below take and return."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)  # type: ignore[no-untyped-call]


_lanes = _Lanes()
_Typed = tuple[Any, Callable[[Any, Any, Any, Any], Any]]
"""A signature, and what writes the code for a call."""
_Operation = Callable[..., Any]
"""Function of a builder and values to the result."""


def _called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call LLVM's intrinsic of this name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _indices(*numbers: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


def _everywhere(builder: Any, value: Any) -> Any:
    """Lanes with this value in each of them."""
    none = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(none, value, ir.IntType(32)(0)), none, _indices(*[0] * LANES))


def _first(builder: Any, count: Any) -> Any:
    """Mask that tells of each lane whether it is one of the first so many."""
    count = _everywhere(builder, builder.trunc(count, ir.IntType(32)))
    return builder.icmp_signed("<", _indices(*range(LANES)), count)


def _address(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any, first: int = 0) -> Any:
    """Address, of this type, of an element of a flat array. The argument after the array is the element's index."""
    data = context.make_array(signature.args[first])(context, builder, arguments[first]).data
    return builder.bitcast(builder.gep(data, [arguments[first + 1]]), kind.as_pointer())


# --- memory -----------------------------------------------------------------------------------------------------------


def _load_of(context: Any, array: Any, at: Any) -> _Typed:
    """The elements of an array from one on."""
    del context, at

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature, arguments, _VECTOR), align=4)

    return _lanes(array, numba.types.intp), generate


def _load_first_of(context: Any, array: Any, at: Any, count: Any) -> _Typed:
    """Load so many elements of an array from one on, and zeros. Others are not read."""
    del context, at, count

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments, _VECTOR)
        zeros, align = ir.Constant(_VECTOR, [0.0] * LANES), ir.IntType(32)(4)
        wanted = _first(builder, arguments[2])
        return _called(builder, "llvm.masked.load.v16f32.p0", _VECTOR, address, align, wanted, zeros)

    return _lanes(array, numba.types.intp, numba.types.intp), generate


def _store_of(context: Any, array: Any, at: Any, value: Any) -> _Typed:
    """Store to the elements of an array from one on."""
    del context, at, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _address(context, builder, signature, arguments, _VECTOR), align=4)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, _lanes), generate


def _store_first_of(context: Any, array: Any, at: Any, value: Any, count: Any) -> _Typed:
    """Store so many lanes to the elements of an array from one on. Others are not written."""
    del context, at, value, count

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments, _VECTOR)
        wanted = _first(builder, arguments[3])
        _called(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments[2], address, ir.IntType(32)(4), wanted)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, _lanes, numba.types.intp), generate


def _store_sums_of(context: Any, array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> _Typed:
    """The sum of each one's lanes, to four elements of an array: additions of one serve others as well."""
    del context, at, a, b, c, d

    def halved(builder: Any, value: Any) -> Any:
        half = value.type.count // 2
        low, high = _indices(*range(half)), _indices(*range(half, 2 * half))
        return builder.fadd(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))

    def joined(builder: Any, first: Any, second: Any) -> Any:
        """Sums of neighbours, of eight lanes each; those of ``one`` before those of ``other`` in each half."""
        even, odd = _indices(0, 2, 8, 10, 4, 6, 12, 14), _indices(1, 3, 9, 11, 5, 7, 13, 15)
        return builder.fadd(builder.shuffle_vector(first, second, even), builder.shuffle_vector(first, second, odd))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c, d = (halved(builder, argument) for argument in arguments[2:])
        sums = halved(builder, joined(builder, joined(builder, a, b), joined(builder, c, d)))
        builder.store(sums, _address(context, builder, signature, arguments, sums.type), align=4)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp, _lanes, _lanes, _lanes, _lanes), generate


def _prefetch_of(context: Any, array: Any, at: Any) -> _Typed:
    """Begin to read the cache line of an element of an array, which need not exist."""
    del context, at

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments, ir.IntType(8))
        read, near, data = (ir.IntType(32)(number) for number in (0, 3, 1))
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), address, read, near, data)
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


def _each_from_of(context: Any, array: Any, at: Any) -> _Typed:
    """An element of an array in all lanes."""
    del context, at

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _everywhere(builder, builder.load(_address(context, builder, signature, arguments, ir.FloatType())))

    return _lanes(array, numba.types.intp), generate


load: Any = intrinsic(_load_of)
load_first: Any = intrinsic(_load_first_of)
store: Any = intrinsic(_store_of)
store_first: Any = intrinsic(_store_first_of)
store_sums: Any = intrinsic(_store_sums_of)
prefetch: Any = intrinsic(_prefetch_of)
each_from: Any = intrinsic(_each_from_of)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _of_one(operation: _Operation, taken: Any = _lanes, given: Any = _lanes) -> Any:
    def of(context: Any, value: Any) -> _Typed:
        del context, value
        return given(taken), lambda _, builder, __, arguments: operation(builder, *arguments)

    return intrinsic(of)


def _of_two(operation: _Operation) -> Any:
    def of(context: Any, first: Any, second: Any) -> _Typed:
        del context, first, second
        return _lanes(_lanes, _lanes), lambda _, builder, __, arguments: operation(builder, *arguments)

    return intrinsic(of)


def _of_three(operation: _Operation) -> Any:
    def of(context: Any, first: Any, second: Any, third: Any) -> _Typed:
        del context, first, second, third
        return _lanes(_lanes, _lanes, _lanes), lambda _, builder, __, arguments: operation(builder, *arguments)

    return intrinsic(of)


def _greater(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


def _smaller(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", first, second), first, second)


def _multiplied_and_added(builder: Any, first: Any, second: Any, added: Any) -> Any:
    return _called(builder, "llvm.fmuladd.v16f32", _VECTOR, first, second, added)


def _greatest(builder: Any, value: Any) -> Any:
    return _called(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), value)


def _sum(builder: Any, value: Any) -> Any:
    return _called(builder, "llvm.vector.reduce.fadd.v16f32", ir.FloatType(), ir.FloatType()(0.0), value)


def _nearest_integer(builder: Any, value: Any) -> Any:
    return _called(builder, "llvm.rint.v16f32", _VECTOR, value)


def _times_power_of_two(builder: Any, value: Any, power: Any, asked: Any) -> Any:
    """``power`` is integers; NaN where ``asked`` is."""
    integers = ir.VectorType(ir.IntType(32), LANES)
    shifted = builder.shl(builder.fptosi(power, integers), integers([23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(value, integers), shifted), _VECTOR)
    return builder.select(builder.fcmp_unordered("uno", asked, asked), asked, scaled)


each: Any = _of_one(_everywhere, taken=numba.types.float32)
"""A number in all lanes."""
greatest: Any = _of_one(_greatest, given=numba.types.float32)
"""Greatest of all lanes."""
total: Any = _of_one(_sum, given=numba.types.float32)
"""Sum of all lanes, one after the other."""
greater: Any = _of_two(_greater)
"""Greater number of each lane; the second one where one is NaN."""
less: Any = _of_two(lambda builder, first, second: builder.fsub(first, second))
"""Difference first - second."""
divided: Any = _of_two(lambda builder, first, second: builder.fdiv(first, second))
"""Quotient first / second."""
multiply: Any = _of_two(lambda builder, first, second: builder.fmul(first, second))
plus: Any = _of_two(lambda builder, first, second: builder.fadd(first, second))
multiply_add: Any = _of_three(_multiplied_and_added)
"""Sum first * second + third."""
_lesser: Any = _of_two(_smaller)
_rounded: Any = _of_one(_nearest_integer)
_scaled: Any = _of_three(_times_power_of_two)


def _exponential(asked: Any) -> Any:
    """Exponential to 2e-7 of its value. NaN stays NaN."""
    x = _lesser(greater(asked, each(_LEAST)), each(_MOST))
    power = _rounded(multiply(x, each(_LOG2_E)))
    rest = multiply_add(power, each(-_LN_2_LOW), multiply_add(power, each(-_LN_2_HIGH), x))
    value = multiply_add(each(_SERIES[0]), rest, each(_SERIES[1]))
    value = multiply_add(value, rest, each(_SERIES[2]))
    value = multiply_add(value, rest, each(_SERIES[3]))
    value = multiply_add(value, rest, each(_SERIES[4]))
    value = multiply_add(value, rest, each(_SERIES[5]))
    value = multiply_add(multiply_add(value, rest, each(_ONE)), rest, each(_ONE))
    return _scaled(value, power, asked)


exponential = compiled(_exponential, any_order=False)


# --- products of matrices ---------------------------------------------------------------------------------------------

PRODUCT_ROWS = 6
PRODUCT_VECTORS = 4 if llvm.get_host_cpu_features().get("avx512f") else 1
"""Vectors of a row of ``small_product``. A processor has 32 registers of sixteen numbers, or 16 of half as many."""


def _small_product_of(
    context: Any,
    a: Any,
    a_at: Any,
    a_stride: Any,
    b: Any,
    b_at: Any,
    b_stride: Any,
    c: Any,
    c_at: Any,
    c_stride: Any,
    depth: Any,
    adds: Any,
    vectors: Any,
) -> _Typed:
    """Six rows of C, of so many vectors (a literal), = A [6, depth] times B [depth, vectors], plus C if ``adds``. C stays in registers meanwhile.

    The matrices are parts of arrays: where they begin, and the distance of two rows.
    """
    del context, a_at, a_stride, b_at, b_stride, c_at, c_stride, depth, adds
    columns, index = range(vectors.literal_value), numba.types.intp
    typed = numba.types.void(a, index, index, b, index, index, c, index, index, index, numba.types.boolean, vectors)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first_a, first_b, first_c = (
            _address(context, builder, signature, arguments, ir.FloatType(), at) for at in (0, 3, 6)
        )
        (a_stride, b_stride, c_stride), (depth, adds) = (arguments[at] for at in (2, 5, 8)), arguments[9:11]

        def row(first: Any, stride: Any, number: Any) -> Any:
            return builder.gep(first, [builder.mul(stride, number)])

        def vector(row: Any, at: int) -> Any:
            return builder.bitcast(builder.gep(row, [ir.IntType(64)(at * LANES)]), _VECTOR.as_pointer())

        places, sums = list[Any](), list[Any]()
        for row_index in range(PRODUCT_ROWS):
            c_row = row(first_c, c_stride, ir.IntType(64)(row_index))
            places += [vector(c_row, at) for at in columns]
        for place in places:
            sums.append(cgutils.alloca_once(builder, _VECTOR))
            builder.store(builder.select(adds, builder.load(place, align=4), _VECTOR(None)), sums[-1])
        a_rows = [row(first_a, a_stride, ir.IntType(64)(row_index)) for row_index in range(PRODUCT_ROWS)]
        with cgutils.for_range(builder, depth) as loop:
            b_row = row(first_b, b_stride, loop.index)
            values = [builder.load(vector(b_row, at), align=4) for at in columns]
            factors = [_everywhere(builder, builder.load(builder.gep(a_row, [loop.index]))) for a_row in a_rows]
            for held, (factor, value) in zip(sums, product(factors, values), strict=True):
                builder.store(_multiplied_and_added(builder, factor, value, builder.load(held)), held)
        for place, held in zip(places, sums, strict=True):
            builder.store(builder.load(held), place, align=4)
        return context.get_dummy_value()

    return typed, generate


small_product: Any = intrinsic(prefer_literal=True)(_small_product_of)
