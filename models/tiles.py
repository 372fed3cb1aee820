"""Instructions of compiled products, for processors with AVX-512.

They are written in LLVM's language, because numba does not make them: a tile of rows by a block of
16 outputs, and the codes of a group of inputs. Inputs and weights are passed as addresses. The
types of numba's functions are its own: mypy does not check this."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .codes import BYTES, FOUR, GROUP, LANES, SUPPORTED, UP_FROM

PANEL = 128  # outputs whose sums a tile of rows has before they are scaled
MAX_TILE = 8  # rows that one pass over a block of weights multiplies
SEGMENT = 16  # groups of inputs whose sum fits into int32
TERMS = 5  # numbers of a row's group, see `quantise`
FLOATS_AT_ONCE = 16  # inputs of a step of products of floats


class BFloat16(ir.Type):
    """LLVM's type; llvmlite has none."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(INT32, LANES)
HALF = ir.VectorType(ir.DoubleType(), GROUP // 2)  # of a group of inputs
HALVES = ir.VectorType(BFloat16(), 2 * LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def instructions(result: Any, *kinds: Any) -> Any:
    """A function of numba with these types. What this decorates writes its instructions, and
    returns its value."""

    def decorate(write: Any) -> Any:
        @intrinsic
        def function(typing, *arguments):
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = write(builder, *cgutils.unpack_tuple(builder, values[0]))
                return context.get_dummy_value() if value is None else value

            return result(types.StarArgTuple(kinds)), generate

        return function

    return decorate


def call(builder: Any, name: str, *values: Any, result: Any = None) -> Any:
    """One of LLVM's own functions, which returns the type of its first argument if not `result`;
    without numbers that are not numbers."""
    kind = ir.FunctionType(result or values[0].type, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")
    return builder.call(function, values, fastmath=("nnan",) if "fmax" in name else ())


class TileWriter:
    """Writes the instructions that multiply a tile of rows by a block of weights.

    rows: of the tile; bits: of a weight. The other arguments are values of 64 bits: the address
    of the inputs and the bytes of a row of them; the address of the terms [rows, width] in int32
    and the bytes of a row; the addresses of the block and of the sums [rows, PANEL] in float64, to
    which the products are added. Inputs are codes in int8; for weights of 16 and 32 bits they are
    float32, without terms."""

    def __init__(self, builder: Any, rows: int, bits: int) -> None:
        self.builder = builder
        self.rows = range(rows)
        self.bits = bits
        self.zero = ir.Constant(VECTOR, [0] * LANES)

    def call(self, name: str, *vectors: Any) -> Any:
        return call(self.builder, name, *vectors)

    def add(self, address: Any, distance: int) -> Any:
        return self.builder.add(address, ir.Constant(INT64, distance))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=BYTES if kind in (VECTOR, FLOATS) else 1)

    def spread(self, address: Any, kind: Any = VECTOR) -> Any:
        """The four bytes at an address, in all lanes."""
        undefined = ir.Constant(kind, ir.Undefined)
        number = self.load(address, kind.element)
        lane = self.builder.insert_element(undefined, number, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(lane, undefined, self.zero)

    def all_lanes(self, number: int) -> Any:
        return ir.Constant(VECTOR, [number] * LANES)

    def eight_bits(self, codes: list[Any], terms: list[Any], block: Any) -> list[Any]:
        """The sums of a group of inputs."""
        sums = [self.spread(self.add(term, 4)) for term in terms]
        for four in range(GROUP // FOUR):
            weights = self.load(self.add(block, four * BYTES))
            for row in self.rows:
                inputs = self.spread(self.add(codes[row], four * FOUR))
                sums[row] = self.call("x86.avx512.vpdpbusd.512", sums[row], weights, inputs)
        return sums

    def four_bits(self, codes: list[Any], terms: list[Any], block: Any) -> list[Any]:
        """The sums of a group of inputs."""
        builder = self.builder
        mask = self.all_lanes(0x0F0F0F0F)
        totals = [self.zero for _ in self.rows]
        for half in range(2):
            sums = [self.spread(self.add(term, 4 + 8 * half)) for term in terms]
            for four in range(4):
                both = self.load(self.add(block, (4 * half + four) * BYTES))
                parts = (both, builder.lshr(both, self.all_lanes(4)))
                for place, part in enumerate(parts):
                    weights = builder.and_(part, mask)
                    for row in self.rows:
                        at = self.add(codes[row], 32 * half + 16 * place + 4 * four)
                        inputs = self.spread(at)
                        sums[row] = self.call("x86.avx512.vpdpbusd.512", sums[row], weights, inputs)
            narrow = ir.VectorType(INT8, 2 * LANES)
            stored = self.load(self.add(block, 8 * BYTES + half * BYTES // 2), narrow)
            pairs = builder.sext(stored, ir.VectorType(INT16, 2 * LANES))
            pairs = builder.bitcast(pairs, VECTOR)
            for row in self.rows:
                low = builder.and_(sums[row], self.all_lanes(0xFFFF))
                both = builder.or_(low, self.spread(self.add(terms[row], 8 + 8 * half)))
                totals[row] = self.call("x86.avx512.vpdpwssd.512", totals[row], both, pairs)
        return totals

    def floats(self, inputs: list[Any], block: Any, sums: list[Any]) -> list[Any]:
        """The sums of all inputs so far; even and odd steps have sums of their own, in one order
        for every number of rows. A step of bfloat16 has two inputs."""
        sums = list(sums)
        kind = FLOATS if self.bits == 32 else VECTOR
        for number in range(FLOATS_AT_ONCE * self.bits // 32):
            weights = self.load(self.add(block, number * BYTES), kind)
            for row in self.rows:
                value = self.spread(self.add(inputs[row], 4 * number), kind)
                at = row + number % 2 * len(self.rows)
                if self.bits == 32:
                    sums[at] = self.call("fma.v16f32", value, weights, sums[at])
                else:
                    pairs = [self.builder.bitcast(one, HALVES) for one in (weights, value)]
                    sums[at] = self.call("x86.avx512bf16.dpbf16ps.512", sums[at], *pairs)
        return sums

    def write(self, arguments: list[Any]) -> None:
        """A loop over the groups, and the sums in memory."""
        builder = self.builder
        inputs, stride, terms, width, block, groups, sums = arguments
        before = builder.block
        loop = builder.append_basic_block("groups")
        after = builder.append_basic_block("done")
        numbers = [ir.Constant(INT64, row) for row in self.rows]
        input_rows = [builder.add(inputs, builder.mul(stride, row)) for row in numbers]
        term_rows = [builder.add(terms, builder.mul(width, row)) for row in numbers]
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(INT64)
        group.add_incoming(ir.Constant(INT64, 0), before)
        floats = self.bits >= 16
        kind = FLOATS if floats else VECTOR
        count = len(self.rows) * (2 if floats else 1)
        totals = [builder.phi(kind) for _ in range(count)]

        def placed(start: Any, size: int) -> Any:
            return builder.add(start, builder.mul(group, ir.Constant(INT64, size)))

        step = FLOATS_AT_ONCE * self.bits // 8 if floats else GROUP
        input_at = [placed(start, step) for start in input_rows]
        term_at = [placed(start, 4 * TERMS) for start in term_rows]
        size = step * LANES if self.bits > 4 else step * LANES // 2 + BYTES
        block_at = placed(block, size)
        if floats:
            following = self.floats(input_at, block_at, totals)
        else:
            of_group = self.eight_bits if self.bits == 8 else self.four_bits
            sums_of_group = of_group(input_at, term_at, block_at)
            scaled = map(builder.mul, sums_of_group, [self.spread(step) for step in term_at])
            following = [builder.add(*pair) for pair in zip(totals, scaled, strict=True)]
        for total, value in zip(totals, following, strict=True):
            total.add_incoming(ir.Constant(kind, [0] * LANES), before)
            total.add_incoming(value, loop)
        next_group = self.add(group, 1)
        group.add_incoming(next_group, loop)
        builder.cbranch(builder.icmp_signed("<", next_group, groups), loop, after)
        builder.position_at_end(after)
        for row in self.rows:
            address = self.add(sums, row * PANEL * 8)
            if floats:
                total = builder.fadd(following[row], following[row + len(self.rows)])
                total = builder.fpext(total, DOUBLES)
            else:
                total = builder.sitofp(following[row], DOUBLES)
            total = builder.fadd(total, self.load(address, DOUBLES))
            builder.store(total, builder.inttoptr(address, DOUBLES.as_pointer()), align=8)


@instructions(types.void, types.intp, types.intp, types.UniTuple(types.intp, 7))
def tile(builder: Any, rows: Any, bits: Any, places: Any) -> None:
    """Multiply 1 to MAX_TILE rows of inputs by one block of weights. places: the arguments of
    `TileWriter.write`: inputs, bytes of a row of them, terms, bytes of a row of them, block, number
    of groups, sums."""
    end = builder.append_basic_block("end")
    kind = builder.add(builder.mul(bits, ir.Constant(INT64, 2 * MAX_TILE)), rows)
    switch = builder.switch(kind, end)
    for width in sorted(SUPPORTED):  # no weights of other bits are packed here
        for number in range(1, MAX_TILE + 1):
            case = builder.append_basic_block(f"bits_{width}_rows_{number}")
            switch.add_case(ir.Constant(INT64, width * 2 * MAX_TILE + number), case)
            builder.position_at_end(case)
            TileWriter(builder, number, width).write(cgutils.unpack_tuple(builder, places))
            builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    element = kind.instance_type if isinstance(kind, types.TypeRef) else kind.dtype
    return types.CPointer(element)(types.intp, kind), generate


@instructions(types.int64, types.intp)
def add_one(builder: Any, address: Any) -> Any:
    """Add one to the number at an address, at which other threads add too."""
    place = builder.inttoptr(address, INT64.as_pointer())
    return builder.atomic_rmw("add", place, ir.Constant(INT64, 1), "seq_cst")


@instructions(types.int64, types.intp)
def number_at(builder: Any, address: Any) -> Any:
    """The number at an address, at which other threads write."""
    return builder.load_atomic(builder.inttoptr(address, INT64.as_pointer()), "acquire", 8)


give_way = types.ExternalFunction("sched_yield", types.int32())


@instructions(types.float64, types.int64)
def float64_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.DoubleType())


@instructions(types.float32, types.int32)
def float32_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.FloatType())


@instructions(types.int32, types.float32)
def bits_of(builder: Any, number: Any) -> Any:
    return builder.bitcast(number, INT32)


@instructions(types.float64, types.intp)
def largest_of_half(builder: Any, numbers: Any) -> Any:
    """The largest absolute value of GROUP / 2 float64 numbers at an address."""
    x_h = builder.load(builder.inttoptr(numbers, HALF.as_pointer()), align=8)
    sizes_h = call(builder, f"fabs.v{HALF.count}f64", x_h)
    return call(builder, f"vector.reduce.fmax.v{HALF.count}f64", sizes_h, result=HALF.element)


@instructions(types.int32, types.intp, types.float64, types.intp)
def quantise_half(builder: Any, numbers: Any, inverse: Any, codes: Any) -> Any:
    """Write the int8 codes of GROUP / 2 float64 numbers to an address; returns their sum."""
    x_h = builder.load(builder.inttoptr(numbers, HALF.as_pointer()), align=8)
    undefined = ir.Constant(HALF, ir.Undefined)
    lane = builder.insert_element(undefined, inverse, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, HALF.count), [0] * HALF.count)
    x_h = builder.fmul(x_h, builder.shuffle_vector(lane, undefined, zeros))
    x_h = builder.fadd(x_h, ir.Constant(HALF, [UP_FROM] * HALF.count))
    codes_h = builder.fptosi(call(builder, f"floor.v{HALF.count}f64", x_h), zeros.type)
    narrow = ir.VectorType(INT8, HALF.count)
    place = builder.inttoptr(codes, narrow.as_pointer())
    builder.store(builder.trunc(codes_h, narrow), place, align=1)
    return call(builder, f"vector.reduce.add.v{HALF.count}i32", codes_h, result=INT32)
