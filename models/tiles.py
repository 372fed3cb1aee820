"""Instructions of compiled products, for processors with AVX-512.

They are written in LLVM's language, because numba does not make them: a tile of rows by a block of
16 outputs, and the codes of a group of inputs. Inputs and weights are passed as addresses. The
types of numba's functions are its own: mypy does not check this."""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .codes import BYTES, FOUR, GROUP, LANES, SUPPORTED, UP_FROM

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "cache": True}
FAST: Any = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}
PANEL = 128  # outputs whose sums a tile of rows has before they are scaled
MAX_TILE = 8  # rows that one pass over a block of weights multiplies
SEGMENT = 16  # groups of inputs whose sum fits into int32
TERMS = 5  # numbers of a row's group, see `quantise`
AHEAD = 16_384  # bytes from a weight that is multiplied to one that is fetched
FETCHING = {4: 8, 8: 5, 16: 5, 32: 5}  # rows from which on fetching is faster, by a weight's bits
KEYS = 8  # of a block, whose scores are one vector of float64
VALUES = 16  # numbers of a value that are added together
QUERIES = 4  # rows of attention that are computed together
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
EIGHT = ir.VectorType(ir.DoubleType(), KEYS)


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

    def weights(self, address: Any, kind: Any = VECTOR) -> Any:
        """A vector of weights; meanwhile later ones are read into the cache, if there are enough
        rows to compute."""
        if len(self.rows) >= FETCHING[self.bits]:
            later = self.builder.inttoptr(self.add(address, AHEAD), INT8.as_pointer())
            options = [ir.Constant(INT32, number) for number in (0, 2, 1)]  # a read; L2; of data
            call(self.builder, "prefetch.p0", later, *options, result=ir.VoidType())
        return self.load(address, kind)

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
            weights = self.weights(self.add(block, four * BYTES))
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
                both = self.weights(self.add(block, (4 * half + four) * BYTES))
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
            weights = self.weights(self.add(block, number * BYTES), kind)
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
        numbers = [ir.Constant(INT64, row) for row in self.rows]
        input_rows = [builder.add(inputs, builder.mul(stride, row)) for row in numbers]
        term_rows = [builder.add(terms, builder.mul(width, row)) for row in numbers]
        floats = self.bits >= 16
        zero = ir.Constant(FLOATS if floats else VECTOR, [0] * LANES)
        count = len(self.rows) * (2 if floats else 1)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
        step = FLOATS_AT_ONCE * self.bits // 8 if floats else GROUP
        size = step * LANES if self.bits > 4 else step * LANES // 2 + BYTES
        with cgutils.for_range(builder, groups) as loop:

            def placed(start: Any, size: int) -> Any:
                return builder.add(start, builder.mul(loop.index, ir.Constant(INT64, size)))

            input_at = [placed(start, step) for start in input_rows]
            block_at = placed(block, size)
            before = [builder.load(total) for total in totals]
            if floats:
                following = self.floats(input_at, block_at, before)
            else:
                term_at = [placed(start, 4 * TERMS) for start in term_rows]
                of_group = self.eight_bits if self.bits == 8 else self.four_bits
                sums_of_group = of_group(input_at, term_at, block_at)
                scaled = map(builder.mul, sums_of_group, [self.spread(step) for step in term_at])
                following = [builder.add(*pair) for pair in zip(before, scaled, strict=True)]
            for total, value in zip(totals, following, strict=True):
                builder.store(value, total)
        after = [builder.load(total) for total in totals]
        for row in self.rows:
            address = self.add(sums, row * PANEL * 8)
            if floats:
                total = builder.fadd(after[row], after[row + len(self.rows)])
                total = builder.fpext(total, DOUBLES)
            else:
                total = builder.sitofp(after[row], DOUBLES)
            total = builder.fadd(total, self.load(address, DOUBLES))
            builder.store(total, builder.inttoptr(address, DOUBLES.as_pointer()), align=8)


def choose(builder: Any, number: Any, writers: dict[int, Callable[[], None]]) -> None:
    """Instructions for some values of a number."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for value, write in writers.items():
        case = builder.append_basic_block(f"case_{value}")
        switch.add_case(ir.Constant(INT64, value), case)
        builder.position_at_end(case)
        write()
        builder.branch(end)
    builder.position_at_end(end)


@instructions(types.void, types.intp, types.intp, types.UniTuple(types.intp, 7))
def tile(builder: Any, rows: Any, bits: Any, places: Any) -> None:
    """Multiply 1 to MAX_TILE rows of inputs by one block of weights. places: the arguments of
    `TileWriter.write`: inputs, bytes of a row of them, terms, bytes of a row of them, block, number
    of groups, sums."""
    arguments = cgutils.unpack_tuple(builder, places)
    kind = builder.add(builder.mul(bits, ir.Constant(INT64, 2 * MAX_TILE)), rows)
    writers = {
        width * 2 * MAX_TILE + number: partial(TileWriter(builder, number, width).write, arguments)
        for width in sorted(SUPPORTED)  # no weights of other bits are packed here
        for number in range(1, MAX_TILE + 1)
    }
    choose(builder, kind, writers)


def at(builder: Any, address: Any, kind: Any, *steps: tuple[Any, int]) -> Any:
    """A pointer to a vector of numbers; a step: how often, times how many bytes."""
    for count, size in steps:
        address = builder.add(address, builder.mul(count, ir.Constant(INT64, size)))
    return builder.inttoptr(address, kind.as_pointer())


def transposed(builder: Any, element: Any, rows: Any, depth: Any, out: Any) -> None:
    """Numbers [8, depth] of a pool, each row at an address of its own, to float64 [depth, 8]."""
    kind = ir.VectorType(element, KEYS)
    size = 2 if element == INT16 else 4 if element == FLOATS.element else 8
    orders = ([0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15])
    orders_2 = [ir.Constant(ir.VectorType(INT32, KEYS), order) for order in orders]
    with cgutils.for_range(builder, builder.udiv(depth, ir.Constant(INT64, KEYS))) as loop:
        places = [at(builder, row, kind, (loop.index, KEYS * size)) for row in rows]
        lines = [builder.load(place, align=size) for place in places]
        for _ in range(3):  # each time one bit of a number's row and one of its column are swapped
            pairs = list(zip(lines[: KEYS // 2], lines[KEYS // 2 :], strict=True))
            lines = [builder.shuffle_vector(*pair, order) for pair in pairs for order in orders_2]
        for column, line in enumerate(lines):
            if element == INT16:  # the bits of bfloat16
                line = builder.zext(line, ir.VectorType(INT32, KEYS))
                line = builder.shl(line, ir.Constant(line.type, [16] * KEYS))
                line = builder.bitcast(line, ir.VectorType(FLOATS.element, KEYS))
            if element != DOUBLES.element:
                line = builder.fpext(line, EIGHT)
            place = builder.add(out, ir.Constant(INT64, column * BYTES))
            builder.store(line, at(builder, place, EIGHT, (loop.index, KEYS * BYTES)), align=8)


@instructions(types.void, types.intp, types.UniTuple(types.intp, 10))
def transpose(builder: Any, size: Any, places: Any) -> None:
    """`transposed`, of numbers of 2, 4 or 8 bytes. places: eight rows, depth, out."""
    *rows, depth, out = cgutils.unpack_tuple(builder, places)
    elements = {2: INT16, 4: FLOATS.element, 8: DOUBLES.element}
    writers = {
        number: partial(transposed, builder, element, rows=rows, depth=depth, out=out)
        for number, element in elements.items()
    }
    choose(builder, size, writers)


def spread_double(builder: Any, place: Any) -> Any:
    """The number at a pointer, in all lanes."""
    undefined = ir.Constant(EIGHT, ir.Undefined)
    lane = builder.insert_element(undefined, builder.load(place), ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, KEYS), [0] * KEYS)
    return builder.shuffle_vector(lane, undefined, zeros)


def multiplied(builder: Any, rows: int, places: list[Any], *, vectors: int, adds: bool) -> None:
    """Rows of `left` [rows, depth] by `right` [depth, 8 * vectors] in float64, with one order of
    additions for any number of rows. places: left, bytes of a row of it, right, bytes of a row of
    it, depth, out, bytes of a row of it. adds: the sums begin with what is in out."""
    left, left_size, right, right_size, depth, out, out_size = places
    double = EIGHT.element
    totals = {}
    for row in range(rows):
        start = builder.add(out, builder.mul(out_size, ir.Constant(INT64, row)))
        for vector in range(vectors):
            place = builder.add(start, ir.Constant(INT64, vector * BYTES))
            place = at(builder, place, EIGHT)
            first = builder.load(place, align=8) if adds else ir.Constant(EIGHT, [0.0] * KEYS)
            totals[row, vector] = (place, cgutils.alloca_once_value(builder, first))
    with cgutils.for_range(builder, depth) as loop:
        start = builder.add(right, builder.mul(right_size, loop.index))
        starts = [builder.add(start, ir.Constant(INT64, v * BYTES)) for v in range(vectors)]
        factors = [builder.load(at(builder, place, EIGHT), align=8) for place in starts]
        for row in range(rows):
            line = builder.add(left, builder.mul(left_size, ir.Constant(INT64, row)))
            number = spread_double(builder, at(builder, line, double, (loop.index, 8)))
            for vector, factor in enumerate(factors):
                total = totals[row, vector][1]
                numbers = (number, factor, builder.load(total))
                builder.store(call(builder, "fma.v8f64", *numbers), total)
    for place, total in totals.values():
        builder.store(builder.load(total), place, align=8)


def multiplier(vectors: int, adds: bool) -> Any:
    """`multiplied`, as a function of numba of 1 to QUERIES rows."""

    @instructions(types.void, types.intp, types.UniTuple(types.intp, 7))
    def multiply(builder: Any, rows: Any, places: Any) -> None:
        arguments = cgutils.unpack_tuple(builder, places)
        writers = {
            number: partial(multiplied, builder, number, arguments, vectors=vectors, adds=adds)
            for number in range(1, QUERIES + 1)
        }
        choose(builder, rows, writers)

    return multiply


score_keys = multiplier(vectors=1, adds=False)
add_values = multiplier(vectors=VALUES // KEYS, adds=True)


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    element = kind.instance_type if isinstance(kind, types.TypeRef) else kind.dtype
    return types.CPointer(element)(types.intp, kind), generate


@instructions(types.int64, types.intp, types.int64)
def add_to(builder: Any, address: Any, number: Any) -> Any:
    """Add to the number at an address, at which other threads add too; returns what it was."""
    place = builder.inttoptr(address, INT64.as_pointer())
    return builder.atomic_rmw("add", place, number, "seq_cst")


@instructions(types.int64, types.intp)
def number_at(builder: Any, address: Any) -> Any:
    """The number at an address, at which other threads write."""
    return builder.load_atomic(builder.inttoptr(address, INT64.as_pointer()), "acquire", 8)


@instructions(types.void, types.int64)
def pause(builder: Any, times: Any) -> None:
    """Let the processor wait for some tens of its cycles, some times."""
    kind = ir.FunctionType(ir.VoidType(), [])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
    with cgutils.for_range(builder, times):
        builder.call(function, [])


@instructions(types.void, types.intp, types.intp, types.intp)
def call_at(builder: Any, function: Any, arguments: Any, cells: Any) -> None:
    """A function at an address, of two addresses."""
    kind = ir.FunctionType(ir.VoidType(), [INT64, INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments, cells])


system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


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


# The cells of a team, which every thread has of its own, see `Team`. Those that all share: the
# counter of the barriers, how many threads sleep, and the function that the team computes.
SHARED, THREAD, THREADS, PASSED, TEAM_FIELDS = range(5)
COUNTER, SLEEPING, FUNCTION, ARGUMENTS, SHARED_FIELDS = range(5)
TRIES = 6_000  # of a thread that waits for others, before it sleeps
IDLE_TRIES = 40_000  # of one that waits for the next function: about a millisecond
FUTEX = 202  # the system call of Linux on x86-64
WAIT = 128  # at a futex of one process
WAKE = 129


@njit(**OPTIONS)
def share(count, team):
    """The part of a range that a thread of a team computes."""
    return count * team[THREAD] // team[THREADS], count * (team[THREAD] + 1) // team[THREADS]


@njit(**OPTIONS)
def futex(address, operation, number):
    arguments = (FUTEX, address, operation, number, 0, 0, 0)
    return system_call(*arguments)


@njit(**OPTIONS)
def barrier(team, tries=TRIES):
    """Wait until all threads of a team are here. A thread first spins, then sleeps, since another
    program may use the core of the thread that it waits for."""
    if team[THREADS] > 1:
        team[PASSED] += 1
        counter = team[SHARED] + 8 * COUNTER
        sleeping = team[SHARED] + 8 * SLEEPING
        last = team[PASSED] * team[THREADS]
        if add_to(counter, 1) + 1 == last:
            if number_at(sleeping):
                futex(counter, WAKE, team[THREADS])
            return
        for _ in range(tries):
            if number_at(counter) >= last:
                return
            pause(1)
        add_to(sleeping, 1)
        seen = number_at(counter)
        while seen < last:
            futex(counter, WAIT, seen & 0xFFFFFFFF)
            seen = number_at(counter)
        add_to(sleeping, -1)
