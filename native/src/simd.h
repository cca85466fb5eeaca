#pragma once
// Vectors of floats in the width of the instruction set this is compiled for; everything has internal linkage.
#include "kernel_table.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define TINYKV_LANES 16
#elif defined(__AVX2__)
#define TINYKV_LANES 8
#else
#define TINYKV_LANES 4
#endif
#define TINYKV_INLINE static inline __attribute__((always_inline))
#define TINYKV_UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int kLanes = TINYKV_LANES;
static_assert(tinykv::kPad % kLanes == 0 && tinykv::kBlock % kLanes == 0);

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr float kMinusInfinity = -__builtin_inff();

TINYKV_INLINE Floats splat(float x) {
  return x - Floats{};
}

// ---- Loads, converted to float ----

TINYKV_INLINE Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

TINYKV_INLINE Floats widen(Halves bits, Bfloat16) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#elif defined(__aarch64__)
  return (Floats)vshll_n_u16((uint16x4_t)bits, 16);
#else
  return (Floats)(__builtin_convertvector(bits, Bits) << 16);
#endif
}

TINYKV_INLINE Floats widen(Halves bits, Float16) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)bits);
#else
  // A half's exponent is 112 smaller; the product by 2^112 also makes its subnormal numbers right.
  Bits half = __builtin_convertvector(bits, Bits);
  Bits magnitude = (half & 0x7fff) << 13;
  Bits finite = (Bits)((Floats)magnitude * 0x1p112f);
  Bits special = (Bits)(magnitude >= 0x0f800000) & 0x7f800000;
  return (Floats)(finite | special | ((half & 0x8000) << 16));
#endif
}

template <class T>
TINYKV_INLINE Floats load(const T* from) {
  Halves bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return widen(bits, T{});
}

// One element.
TINYKV_INLINE float to_float(float x) {
  return x;
}
TINYKV_INLINE float to_float(Bfloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}
TINYKV_INLINE float to_float(Float16 x) {
#if defined(__AVX2__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
#elif defined(__aarch64__)
  __fp16 half;
  __builtin_memcpy(&half, &x.bits, sizeof half);
  return half;
#else
  const Float16 lanes[kLanes] = {x};
  return load(lanes)[0];
#endif
}

// The last 8 elements of a row whose length is a multiple of 8 but not of the vector; zeros in the other lanes.
TINYKV_INLINE Floats load_tail(const float* from) {
  Floats x{};
  __builtin_memcpy(&x, from, 8 * sizeof *from < sizeof x ? 8 * sizeof *from : sizeof x);
  return x;
}
template <class T>
TINYKV_INLINE Floats load_tail(const T* from) {
  Halves bits{};
  __builtin_memcpy(&bits, from, 8 * sizeof *from < sizeof bits ? 8 * sizeof *from : sizeof bits);
  return widen(bits, T{});
}

// ---- Stores, rounded to nearest even ----

TINYKV_INLINE void store(float* to, Floats x) {
  __builtin_memcpy(to, &x, sizeof x);
}

TINYKV_INLINE Halves narrow(Floats x, Bfloat16) {
  Bits bits = (Bits)x;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits nan = (Bits)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), Halves);
}

TINYKV_INLINE Halves narrow(Floats x, Float16) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (Halves)vcvt_f16_f32((float32x4_t)x);
#else
  Bits bits = (Bits)x, magnitude = bits & 0x7fffffff;
  Bits normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Adding 0.5 rounds a subnormal half at its last bit, as that is the last bit of a float in [0.5, 1).
  Bits subnormal = (Bits)((Floats)magnitude + 0.5f) - 0x3f000000;
  Bits small = (Bits)(magnitude < 0x38800000), large = (Bits)(magnitude >= 0x477ff000);
  Bits nan = (Bits)(magnitude > 0x7f800000);
  Bits result = (small & subnormal) | (~small & normal);
  result = (large & (0x7c00 | (nan & 0x200))) | (~large & result);
  return __builtin_convertvector(result | ((bits >> 16) & 0x8000), Halves);
#endif
}

template <class T>
TINYKV_INLINE void store(T* to, Floats x) {
  Halves bits = narrow(x, T{});
  __builtin_memcpy(to, &bits, sizeof bits);
}
template <class T>
TINYKV_INLINE void store_tail(T* to, Floats x) {
  T lanes[kLanes];
  store(lanes, x);
  __builtin_memcpy(to, lanes, 8 * sizeof *to < sizeof lanes ? 8 * sizeof *to : sizeof lanes);
}

// ---- Arithmetic ----

TINYKV_INLINE Floats larger(Floats a, Floats b) {
  return b > a ? b : a;
}

TINYKV_INLINE float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

TINYKV_INLINE float max(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  return lanes[0];
#endif
}

// 2^x for x <= 126, relative error 1e-7; exactly 0 below 2^-126, NaN stays.
TINYKV_INLINE Floats exp2(Floats x) {
  const Floats bounded = x < -126.f ? splat(-126.f) : x;
  // The sum with 1.5 * 2^23 has the nearest whole number in its last bits.
  const Floats shifted = bounded + 12582912.f;
  const Floats rest = bounded - (shifted - 12582912.f);
  // Minimax polynomial of 2^rest on [-0.5, 0.5].
  Floats y = splat(1.3276471993e-3f);
  y = y * rest + 9.6755413345e-3f;
  y = y * rest + 5.5507132735e-2f;
  y = y * rest + 2.4022119724e-1f;
  y = y * rest + 6.9314696706e-1f;
  y = y * rest + 1.0000000717f;
  // Shifted to the exponent's place, the constant's bits are gone and the whole number is left.
  const Floats power = (Floats)(((Bits)shifted << 23) + (127u << 23));
  return x < -126.f ? Floats{} : y * power;
}

TINYKV_INLINE float exp2(float x) {
  return exp2(splat(x))[0];
}

}  // namespace
