// Packed matmul on CPUs: a handler of XLA's foreign function interface. Codes are dequantised in registers.
//
// Two orders of codes. "Columns" [B, N]: one vector has a byte of each of 16 outputs, and a group's sum of level times
// input is multiplied by the outputs' scales. "Rows" [N, K] in 8 bits: one vector has 16 inputs of an output, and
// lanes are added up at the end. The sum of an output is made in one order, whatever rows and threads there are, so
// that a row's result does not depend on the rows beside it.
//
// Legend: M rows, K inputs, N outputs, L layers, G groups of inputs, P stored parameters of a group, S blocks of 256.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "native_vectors.h"
#include "xla/ffi/api/ffi.h"

// Of arrays that are read in loops which are not unrolled, compilers keep copies in memory.
#define UNROLLED _Pragma("GCC unroll 64")

namespace ffi = xla::ffi;

namespace {

constexpr int kWidth = Floats::kWidth;
// Inputs whose products are added up before they are added to the result: rounding errors grow with the length of sums.
constexpr int64_t kRun = 256;
// Multiplications that are worth another thread.
constexpr int64_t kShare = 1 << 17;

enum class Kind { kScale, kMinimum, kZero, kExponent, kBlocks, kSignedBlocks, kBlocksWithMinima };

// Scales of groups and the values of middle codes, as they are stored: [P, G, N], or bytes of k-quants [P, S, N].
struct Parameters {
  const uint8_t* data;
  ffi::DataType dtype;
  Kind kind;
  int64_t groups, blocks, columns;
  float middle;

  bool offsets() const { return kind == Kind::kMinimum || kind == Kind::kZero || kind == Kind::kBlocksWithMinima; }

  Floats number(int64_t row, int64_t column) const {
    int64_t at = row * columns + column;
    if (dtype == ffi::DataType::F32) return load(reinterpret_cast<const float*>(data) + at);
    if (dtype == ffi::DataType::F16) return load_half(data + 2 * at);
    if (dtype == ffi::DataType::BF16) return load_bfloat16(data + 2 * at);
    // Exponents: 2^(byte - 127), of which 0 is half of the smallest normal number; 255 is infinite.
    alignas(64) float found[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      uint32_t bits = data[at + i] ? uint32_t{data[at + i]} << 23 : 1u << 22;
      std::memcpy(found + i, &bits, 4);
    }
    return load(found);
  }

  Codes byte(int64_t part, int64_t block, int64_t column) const {
    return load_bytes(data + (part * blocks + block) * columns + column);
  }
  Floats number_of_blocks(int64_t part, int64_t block, int64_t column) const {
    return halves(byte(part, block, column) | left<8>(byte(part + 1, block, column)));
  }

  // One scale of codes in the order of rows.
  float one(int64_t at) const {
    if (dtype == ffi::DataType::F32) return reinterpret_cast<const float*>(data)[at];
    uint16_t bits;
    std::memcpy(&bits, data + 2 * at, 2);
    if (dtype == ffi::DataType::F16) return half(bits);
    float found;
    uint32_t wide = uint32_t{bits} << 16;
    std::memcpy(&found, &wide, 4);
    return found;
  }

  void read(int64_t group, int64_t column, Floats& scale, Floats& offset) const {
    if (kind < Kind::kBlocks) {
      scale = number(group, column);
      if (kind == Kind::kMinimum) offset = multiply_add(spread(middle), scale, number(groups + group, column));
      if (kind == Kind::kZero) offset = (spread(middle) - number(groups + group, column)) * scale;
      return;
    }
    int64_t parts = groups / blocks, block = group / parts, part = group % parts;
    bool minima = kind == Kind::kBlocksWithMinima;
    Codes integer = byte((minima ? 4 : 2) + part, block, column);
    if (kind == Kind::kSignedBlocks) integer = signed_bytes(integer);
    scale = number_of_blocks(0, block, column) * to_floats(integer);
    if (!minima) return;
    Floats minimum = number_of_blocks(2, block, column) * to_floats(byte(4 + parts + part, block, column));
    offset = multiply_add(spread(middle), scale, spread(0) - minimum);
  }
};

struct Call {
  const float* x;  // [M, K]
  const uint8_t* codes;
  Parameters parameters;
  const float* levels;  // 16
  float* out;           // [M, N]
  int64_t rows, inputs, columns, groups;
  const float* turned;  // tiles of rows, [K, rows of the tile] each
  const float* sums;    // of groups of inputs, tiles of rows, [G, rows of the tile] each
};

template <int kBits>
struct Tuple {  // codes that share bytes
  static constexpr int kCodes = kBits == 8 ? 1 : kBits == 4 ? 2 : kBits == 2 ? 4 : kBits == 6 ? 4 : 8;
  static constexpr int kBytes = kBits * kCodes / 8;
};

template <int kBits, int kLane>
inline Codes code_of(const Codes* bytes) {
  constexpr int kByte = kBits * kLane / 8, kShift = kBits * kLane % 8;
  Codes found = right<kShift>(bytes[kByte]);
  if constexpr (kShift + kBits > 8) found = found | left<8 - kShift>(bytes[kByte + 1]);
  return found;
}

// Tables of fewer than 16 levels repeat them, so that higher bits of a code do not matter.
template <int kBits, bool kTable>
inline Floats value_of(Codes code, const Table& levels) {
  if constexpr (kTable) return look_up(levels, code);
  else return to_floats(code & ((1 << kBits) - 1)) - spread(1 << (kBits - 1));
}

// Adds one lane of a tuple of codes, whose inputs of all rows are neighbours in `x`.
template <int kBits, bool kTable, int kRows, int kVectors, int kLane>
inline void add_lane(const Codes (&bytes)[kVectors][Tuple<kBits>::kBytes], const float* x, const Table& levels,
                     Floats (&sums)[kRows][kVectors]) {
  Floats values[kVectors];
  UNROLLED for (int v = 0; v < kVectors; ++v) values[v] = value_of<kBits, kTable>(code_of<kBits, kLane>(bytes[v]), levels);
  UNROLLED for (int r = 0; r < kRows; ++r) {
    Floats input = spread(x[kLane * kRows + r]);
    UNROLLED for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(values[v], input, sums[r][v]);
  }
}

template <int kBits, bool kTable, int kRows, int kVectors, int... kLanes>
inline void add_tuple(const Codes (&bytes)[kVectors][Tuple<kBits>::kBytes], const float* x, const Table& levels,
                      Floats (&sums)[kRows][kVectors], std::integer_sequence<int, kLanes...>) {
  (add_lane<kBits, kTable, kRows, kVectors, kLanes>(bytes, x, levels, sums), ...);
}

// Results [kRows, kVectors * kWidth] of rows from `top` and outputs from `column`, into `out` with that shape.
template <int kBits, bool kTable, int kRows, int kVectors>
void columns_tile(const Call& call, int64_t top, int64_t column, float* out) {
  constexpr int kCodes = Tuple<kBits>::kCodes, kBytes = Tuple<kBits>::kBytes;
  const int64_t n = call.columns, tuples = call.inputs / call.groups / kCodes;
  Table levels{};
  if constexpr (kTable) levels = table(call.levels);
  const float* x = call.turned + top * call.inputs;
  const uint8_t* codes = call.codes + column;
  std::fill_n(out, kRows * kVectors * kWidth, 0.0f);
  for (int64_t group = 0; group < call.groups; ++group) {
    Floats scale[kVectors], offset[kVectors];
    UNROLLED for (int v = 0; v < kVectors; ++v) call.parameters.read(group, column + v * kWidth, scale[v], offset[v]);
    for (int64_t begin = 0; begin < tuples; begin += kRun / kCodes) {
      Floats sums[kRows][kVectors];
      UNROLLED for (int r = 0; r < kRows; ++r)
        UNROLLED for (int v = 0; v < kVectors; ++v) sums[r][v] = zeros();
      for (int64_t t = begin; t < std::min(tuples, begin + kRun / kCodes); ++t) {
        Codes bytes[kVectors][kBytes];
        UNROLLED for (int v = 0; v < kVectors; ++v)
          UNROLLED for (int b = 0; b < kBytes; ++b) bytes[v][b] = load_bytes(codes + b * n + v * kWidth);
        UNROLLED for (int b = 0; b < kBytes; ++b) __builtin_prefetch(codes + (b + 16 * kBytes) * n);
        add_tuple<kBits, kTable, kRows, kVectors>(bytes, x, levels, sums, std::make_integer_sequence<int, kCodes>());
        codes += kBytes * n;
        x += kCodes * kRows;
      }
      UNROLLED for (int r = 0; r < kRows; ++r)
        UNROLLED for (int v = 0; v < kVectors; ++v) {
          float* at = out + (r * kVectors + v) * kWidth;
          store(at, multiply_add(scale[v], sums[r][v], load(at)));
        }
    }
    if (!call.parameters.offsets()) continue;
    const float* of_inputs = call.sums + top * call.groups + group * kRows;
    UNROLLED for (int r = 0; r < kRows; ++r)
      UNROLLED for (int v = 0; v < kVectors; ++v) {
        float* at = out + (r * kVectors + v) * kWidth;
        store(at, multiply_add(offset[v], spread(of_inputs[r]), load(at)));
      }
  }
}

// Results of rows from `top` for outputs [begin, end), where vectors may reach over the end of all outputs.
template <int kBits, bool kTable, int kRows, int kVectors>
void columns_part(const Call& call, int64_t top, int64_t begin, int64_t end) {
  alignas(64) float found[kRows * kVectors * kWidth];
  auto write = [&](int64_t first, int64_t column, int64_t last, int64_t width) {
    for (int r = 0; r < std::min<int64_t>(kRows, call.rows - top); ++r)
      std::copy(found + r * width + first - column, found + r * width + last - column,
                call.out + (top + r) * call.columns + first);
  };
  for (; begin + kVectors * kWidth <= end; begin += kVectors * kWidth) {
    columns_tile<kBits, kTable, kRows, kVectors>(call, top, begin, found);
    write(begin, begin, begin + kVectors * kWidth, kVectors * kWidth);
  }
  for (; begin < end; begin += kWidth) {
    int64_t column = std::min(begin, call.columns - kWidth);
    columns_tile<kBits, kTable, kRows, 1>(call, top, column, found);
    write(begin, column, std::min(begin + kWidth, end), kWidth);
  }
}

// Rows of the tile that begins at `top`; those beyond the last row are computed from zeros and left out.
int64_t tile_rows(int64_t rows, int64_t top) { return rows - top > 12 ? 16 : rows - top > 1 ? 4 : 1; }

template <int kBits, bool kTable>
void columns_rows(const Call& call, int64_t begin, int64_t end) {
  for (int64_t top = 0; top < call.rows;) {
    int64_t tall = tile_rows(call.rows, top);
    if (tall == 16) columns_part<kBits, kTable, 16, 1>(call, top, begin, end);
    else if (tall == 4) columns_part<kBits, kTable, 4, 4>(call, top, begin, end);
    else columns_part<kBits, kTable, 1, 4>(call, top, begin, end);
    top += tall;
  }
}

float sum_of(const float* x, int64_t size) {
  int64_t i = 0;
  Floats sums = zeros();
  for (; i + kWidth <= size; i += kWidth) sums = multiply_add(load(x + i), spread(1), sums);
  float found = total(sums);
  for (; i < size; ++i) found += x[i];
  return found;
}

// Inputs and their groups' sums, with the rows of a tile beside one another.
void turn(Call& call, std::vector<float>& scratch) {
  const int64_t m = call.rows, k = call.inputs, g = call.groups, size = k / g, most = m + 3;
  const bool offsets = call.parameters.offsets();
  scratch.assign((m > 1 ? most * k : 0) + (offsets ? most * g : 0), 0.0f);
  float* sums = scratch.data() + (m > 1 ? most * k : 0);
  call.turned = m > 1 ? scratch.data() : call.x;
  call.sums = sums;
  for (int64_t top = 0; top < m; top += tile_rows(m, top)) {
    const int64_t tall = tile_rows(m, top);
    for (int64_t r = 0; r < std::min(tall, m - top); ++r) {
      const float* row = call.x + (top + r) * k;
      if (m > 1)
        for (int64_t i = 0; i < k; ++i) scratch[top * k + i * tall + r] = row[i];
      for (int64_t group = 0; offsets && group < g; ++group)
        sums[top * g + group * tall + r] = sum_of(row + group * size, size);
    }
  }
}

// Results of kRows rows and kOutputs outputs whose codes are in the order of inputs.
template <int kRows, int kOutputs>
void rows_tile(const Call& call, int64_t top, int64_t column) {
  const int64_t k = call.inputs, size = k / call.groups;
  Floats sums[kRows][kOutputs];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int o = 0; o < kOutputs; ++o) sums[r][o] = zeros();
  const uint8_t* codes = call.codes + column * k;
  const float* x = call.x + top * k;
  for (int64_t group = 0; group < call.groups; ++group) {
    Floats scale[kOutputs], middle[kOutputs];
    UNROLLED for (int o = 0; o < kOutputs; ++o) {
      scale[o] = spread(call.parameters.one((column + o) * call.groups + group));
      middle[o] = spread(-128) * scale[o];
    }
    for (int64_t i = group * size; i < (group + 1) * size; i += kWidth)
      UNROLLED for (int o = 0; o < kOutputs; ++o) {
        Floats value = multiply_add(to_floats(load_bytes(codes + o * k + i)), scale[o], middle[o]);
        UNROLLED for (int r = 0; r < kRows; ++r) sums[r][o] = multiply_add(value, load(x + r * k + i), sums[r][o]);
      }
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int o = 0; o < kOutputs; ++o) call.out[(top + r) * call.columns + column + o] = total(sums[r][o]);
}

template <int kRows, int kOutputs>
void rows_part(const Call& call, int64_t top, int64_t begin, int64_t end) {
  for (; begin + kOutputs <= end; begin += kOutputs) rows_tile<kRows, kOutputs>(call, top, begin);
  for (; begin < end; ++begin) rows_tile<kRows, 1>(call, top, begin);
}

void rows_of_bytes(const Call& call, int64_t first, int64_t last) {
  // So few outputs at a time that their codes stay in the cache for all rows.
  for (int64_t begin = first; begin < last; begin += 16) {
    int64_t end = std::min(last, begin + 16);
    for (int64_t top = 0; top < call.rows;) {
      int64_t left = call.rows - top;
      if (left >= 8) rows_part<8, 2>(call, top, begin, end), top += 8;
      else if (left >= 4) rows_part<4, 4>(call, top, begin, end), top += 4;
      else rows_part<1, 4>(call, top, begin, end), top += 1;
    }
  }
}

using Part = void (*)(const Call&, int64_t, int64_t);

Part part_of(int64_t bits, bool table, bool by_rows) {
  if (by_rows) return bits == 8 ? rows_of_bytes : nullptr;
  switch (bits) {
    case 2: return columns_rows<2, true>;
    case 3: return columns_rows<3, true>;
    case 4: return columns_rows<4, true>;
    case 5: return table ? nullptr : columns_rows<5, false>;
    case 6: return table ? nullptr : columns_rows<6, false>;
    case 8: return table ? nullptr : columns_rows<8, false>;
    default: return nullptr;
  }
}

// Work that threads take a piece of at a time. A thread that comes when all is taken finds nothing, so that none waits
// for one that the pool has not started.
struct Pieces {
  std::atomic<int64_t> next{0}, done{0};
  int64_t count;
};

template <typename Run>
void share(ffi::ThreadPool& pool, int64_t count, int64_t helpers, const Run& run) {
  auto pieces = std::make_shared<Pieces>();
  pieces->count = count;
  auto work = [pieces, &run] {
    for (int64_t i; (i = pieces->next.fetch_add(1)) < pieces->count;) {
      run(i);
      pieces->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; pieces->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

ffi::Error packed_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer,
                         ffi::Buffer<ffi::U8> codes, ffi::AnyBuffer parameters, ffi::ResultBuffer<ffi::F32> out,
                         int64_t bits, int64_t groups, int64_t kind, bool by_rows, ffi::Span<const float> levels) {
  auto of = codes.dimensions(), stored = parameters.dimensions();
  if (of.size() != 3 || stored.size() != 4 || of[0] != stored[0])
    return ffi::Error::InvalidArgument("packed_matmul: codes have three dimensions and parameters four.");
  const int64_t layers = of[0], m = x.dimensions()[0], k = x.dimensions()[1], n = out->dimensions()[1];
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, layers - 1);
  const bool table = levels.size() == 16;
  Part part = part_of(bits, table, by_rows);
  if (part == nullptr || (bits <= 4 && !table) || (!by_rows && n < kWidth) ||
      static_cast<int64_t>(codes.element_count()) != layers * (k * n * bits / 8))
    return ffi::Error::InvalidArgument("packed_matmul: shapes and codes that the kernel does not have.");
  Call call;
  call.x = x.typed_data();
  call.codes = codes.typed_data() + at * (codes.element_count() / layers);
  const uint8_t* data = static_cast<const uint8_t*>(parameters.untyped_data());
  call.parameters = {data + at * (parameters.size_bytes() / layers), parameters.element_type(), Kind(kind), groups,
                     stored[2], n, static_cast<float>(1 << (bits - 1))};
  call.levels = levels.begin();
  call.out = out->typed_data();
  call.rows = m, call.inputs = k, call.columns = n, call.groups = groups;
  thread_local std::vector<float> scratch;
  if (!by_rows) turn(call, scratch);
  // Pieces of whole cache lines of codes.
  const int64_t threads = std::max<int64_t>(1, std::min(pool.num_threads(), m * k * n / kShare));
  const int64_t lines = (n + 63) / 64, count = threads == 1 ? 1 : std::min(lines, 4 * threads);
  auto run = [&](int64_t i) {
    int64_t begin = i * lines / count * 64, end = std::min(n, (i + 1) * lines / count * 64);
    if (begin < end) part(call, begin, end);
  };
  if (count == 1) run(0);
  else share(pool, count, threads - 1, run);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxllmPackedMatmul, packed_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("kind")
                                  .Attr<bool>("by_rows")
                                  .Attr<ffi::Span<const float>>("levels"));

extern "C" const char* jaxllm_packed_matmul_vectors() { return PACKED_MATMUL_VECTORS; }
