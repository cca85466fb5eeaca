// Conversions and 2^x of the base instruction set, which has them in plain arithmetic.
#include <cmath>

#include "check.h"
#include "numbers.h"
#include "simd_shuffles.h"

namespace {

void test_halves() {
  for (int bits = 0; bits < 0x10000; ++bits) {
    Float16 half[kLanes];
    for (auto& lane : half) lane.bits = uint16_t(bits);
    const float right = test::half_to_float(uint16_t(bits)), got = load(half)[0];
    CHECK_WITH(got == right || (std::isnan(got) && std::isnan(right)), std::to_string(bits));
    Float16 back[kLanes];
    store(back, splat(right));
    CHECK_WITH(back[0].bits == bits || std::isnan(right), std::to_string(bits));
  }
}

void test_rounding() {
  // Half way between two halves: to the even one, also among subnormal ones and at the largest.
  Float16 half[kLanes];
  store(half, splat(1 + 0x1p-11f));
  CHECK(half[0].bits == 0x3c00);
  store(half, splat(1 + 0x3p-11f));
  CHECK(half[0].bits == 0x3c02);
  store(half, splat(0x3p-25f));
  CHECK(half[0].bits == 2);
  store(half, splat(65519.f));
  CHECK(half[0].bits == 0x7bff);
  store(half, splat(65520.f));
  CHECK(half[0].bits == 0x7c00);
  Bfloat16 brain[kLanes];
  store(brain, splat(1 + 0x1p-8f));
  CHECK(brain[0].bits == 0x3f80);
  store(brain, splat(1 + 0x3p-8f));
  CHECK(brain[0].bits == 0x3f82);
  store(brain, splat(__builtin_nanf("")));
  CHECK(std::isnan(test::to_double(reinterpret_cast<char*>(brain), tinykv::Dtype::bfloat16)));
}

void test_exp2() {
  for (float x = -125.9f; x <= 0; x += 0.0137f) CHECK(std::abs(exp2(x) / std::exp2(double(x)) - 1) < 3e-7);
  CHECK(exp2(-127.f) == 0);
  CHECK(exp2(kMinusInfinity) == 0);
  CHECK(std::isnan(exp2(__builtin_nanf(""))));
}

void test_transpose() {
  Floats square[kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) square[i][j] = float(i * kLanes + j);
  transpose(square);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) CHECK(square[i][j] == float(j * kLanes + i));
}

}  // namespace

int main() {
  test_halves();
  test_rounding();
  test_exp2();
  test_transpose();
  return test::failures;
}
