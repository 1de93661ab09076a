// Vectors of float32 and of codes: AVX-512, AVX2 with FMA and F16C, and plain C++ for every other processor.
//
// Every implementation has the same operations, each with one rounding where the hardware has it, so that kernels are
// written once. `-ffp-contract=off` keeps the compiler from fusing other operations than those that say so.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Defined by tests of the plain vectors.
#if defined(PACKED_MATMUL_PLAIN)
#define PACKED_MATMUL_VECTORS "plain C++"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define PACKED_MATMUL_VECTORS "AVX-512"
#define PACKED_MATMUL_INTRINSICS

namespace {

struct Floats {
  static constexpr int kWidth = 16;
  __m512 v;
};
struct Codes {
  __m512i v;
};
using Table = Floats;

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats spread(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* at) { return {_mm512_loadu_ps(at)}; }
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x.v); }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline float total(Floats x) { return _mm512_reduce_add_ps(x.v); }

inline Codes load_bytes(const uint8_t* at) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
}
inline Codes operator|(Codes a, Codes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Codes operator&(Codes a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
template <int kBits>
inline Codes right(Codes a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
inline Codes left(Codes a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
inline Codes signed_bytes(Codes a) { return {_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24), 24)}; }
inline Floats to_floats(Codes a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Floats bits_as_floats(Codes a) { return {_mm512_castsi512_ps(a.v)}; }

inline Table table(const float* levels) { return load(levels); }
// Only the lowest four bits of a code count.
inline Floats look_up(Table levels, Codes at) { return {_mm512_permutexvar_ps(at.v, levels.v)}; }

inline Floats load_half(const uint8_t* at) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
}
inline float half(uint16_t bits) { return _cvtsh_ss(bits); }
inline Floats halves(Codes bits) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits.v))}; }
inline Floats load_bfloat16(const uint8_t* at) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

}  // namespace
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define PACKED_MATMUL_VECTORS "AVX2"
#define PACKED_MATMUL_INTRINSICS

namespace {

struct Floats {
  static constexpr int kWidth = 8;
  __m256 v;
};
struct Codes {
  __m256i v;
};
struct Table {
  __m256 low, high;
};

inline Floats zeros() { return {_mm256_setzero_ps()}; }
inline Floats spread(float x) { return {_mm256_set1_ps(x)}; }
inline Floats load(const float* at) { return {_mm256_loadu_ps(at)}; }
inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x.v); }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline float total(Floats x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline Codes load_bytes(const uint8_t* at) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)))};
}
inline Codes operator|(Codes a, Codes b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Codes operator&(Codes a, int mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi32(mask))}; }
template <int kBits>
inline Codes right(Codes a) {
  return {_mm256_srli_epi32(a.v, kBits)};
}
template <int kBits>
inline Codes left(Codes a) {
  return {_mm256_slli_epi32(a.v, kBits)};
}
inline Codes signed_bytes(Codes a) { return {_mm256_srai_epi32(_mm256_slli_epi32(a.v, 24), 24)}; }
inline Floats to_floats(Codes a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Floats bits_as_floats(Codes a) { return {_mm256_castsi256_ps(a.v)}; }

inline Table table(const float* levels) { return {load(levels).v, load(levels + 8).v}; }
inline Floats look_up(Table levels, Codes at) {
  __m256 low = _mm256_permutevar8x32_ps(levels.low, at.v), high = _mm256_permutevar8x32_ps(levels.high, at.v);
  return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at.v, 28)))};
}

inline Floats load_half(const uint8_t* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
}
inline float half(uint16_t bits) { return _cvtsh_ss(bits); }
inline Floats halves(Codes bits) {
  __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits.v), _mm256_extracti128_si256(bits.v, 1));
  return {_mm256_cvtph_ps(packed)};
}
inline Floats load_bfloat16(const uint8_t* at) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

}  // namespace
#else
#define PACKED_MATMUL_VECTORS "plain C++"
#endif

#if !defined(PACKED_MATMUL_INTRINSICS)
namespace {

struct Floats {
  static constexpr int kWidth = 8;
  float v[kWidth];
};
struct Codes {
  uint32_t v[Floats::kWidth];
};
struct Table {
  float v[16];
};

// Loops over constant sizes, which compilers turn into the vectors that the processor has.
#define EACH(type, expression)                                       \
  type out;                                                          \
  for (int i = 0; i < Floats::kWidth; ++i) out.v[i] = (expression); \
  return out

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float half(uint32_t bits) {
  uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  float small = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -small : small;
}
inline uint32_t two_bytes(const uint8_t* at) { return at[0] | uint32_t{at[1]} << 8; }

inline Floats spread(float x) { EACH(Floats, x); }
inline Floats zeros() { return spread(0); }
inline Floats load(const float* at) { EACH(Floats, at[i]); }
inline void store(float* at, Floats x) { std::memcpy(at, x.v, sizeof x.v); }
inline Floats operator*(Floats a, Floats b) { EACH(Floats, a.v[i] * b.v[i]); }
inline Floats operator-(Floats a, Floats b) { EACH(Floats, a.v[i] - b.v[i]); }
#if defined(FP_FAST_FMAF)
inline Floats multiply_add(Floats a, Floats b, Floats c) { EACH(Floats, std::fma(a.v[i], b.v[i], c.v[i])); }
#else
inline Floats multiply_add(Floats a, Floats b, Floats c) { EACH(Floats, a.v[i] * b.v[i] + c.v[i]); }
#endif
inline float total(Floats x) {
  float sum = 0;
  for (float one : x.v) sum += one;
  return sum;
}

inline Codes load_bytes(const uint8_t* at) { EACH(Codes, at[i]); }
inline Codes operator|(Codes a, Codes b) { EACH(Codes, a.v[i] | b.v[i]); }
inline Codes operator&(Codes a, int mask) { EACH(Codes, a.v[i] & static_cast<uint32_t>(mask)); }
template <int kBits>
inline Codes right(Codes a) {
  EACH(Codes, a.v[i] >> kBits);
}
template <int kBits>
inline Codes left(Codes a) {
  EACH(Codes, a.v[i] << kBits);
}
inline Codes signed_bytes(Codes a) { EACH(Codes, static_cast<uint32_t>(int32_t{static_cast<int8_t>(a.v[i])})); }
inline Floats to_floats(Codes a) { EACH(Floats, static_cast<float>(static_cast<int32_t>(a.v[i]))); }
inline Floats bits_as_floats(Codes a) { EACH(Floats, float_of(a.v[i])); }

inline Table table(const float* levels) {
  Table out;
  std::memcpy(out.v, levels, sizeof out.v);
  return out;
}
inline Floats look_up(const Table& levels, Codes at) { EACH(Floats, levels.v[at.v[i] & 15]); }

inline Floats load_half(const uint8_t* at) { EACH(Floats, half(two_bytes(at + 2 * i))); }
inline Floats halves(Codes bits) { EACH(Floats, half(bits.v[i])); }
inline Floats load_bfloat16(const uint8_t* at) { EACH(Floats, float_of(two_bytes(at + 2 * i) << 16)); }

#undef EACH

}  // namespace
#endif
