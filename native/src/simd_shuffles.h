#pragma once
// Moving lanes between vectors: a transposed square, and the sums of four vectors.
#include "simd.h"

namespace {

#if TINYKV_LANES == 16
#define TINYKV_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TINYKV_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif TINYKV_LANES == 8
#define TINYKV_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define TINYKV_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define TINYKV_LOW 0, 4, 1, 5
#define TINYKV_HIGH 2, 6, 3, 7
#endif

// The lanes of a and b in turn: of their lower and of their upper halves.
#if defined(__clang__)
TINYKV_INLINE Floats zip_low(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, TINYKV_LOW);
}
TINYKV_INLINE Floats zip_high(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, TINYKV_HIGH);
}
#else
TINYKV_INLINE Floats zip_low(Floats a, Floats b) {
  return __builtin_shuffle(a, b, (Ints){TINYKV_LOW});
}
TINYKV_INLINE Floats zip_high(Floats a, Floats b) {
  return __builtin_shuffle(a, b, (Ints){TINYKV_HIGH});
}
#endif

// Transposes a square of kLanes x kLanes in place.
TINYKV_INLINE void transpose(Floats (&rows)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Floats zipped[kLanes];
    TINYKV_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kLanes / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kLanes / 2]);
    }
    TINYKV_UNROLL
    for (int i = 0; i < kLanes; ++i) rows[i] = zipped[i];
  }
}

// Stores the sums of four vectors.
TINYKV_INLINE void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  Floats ac = zip_low(a, c) + zip_high(a, c), bd = zip_low(b, d) + zip_high(b, d);
  store(to, zip_low(ac, bd) + zip_high(ac, bd));
#endif
}

}  // namespace
