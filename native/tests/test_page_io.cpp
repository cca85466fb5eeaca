#include "page_io.h"

#include <algorithm>

#include "check.h"
#include "numbers.h"

using namespace tinykv;

namespace {

constexpr int kPages = 5, kHeads = 2, kSize = 4, kDim = 8;

struct Memory {
  std::vector<float> numbers = std::vector<float>(kPages * kHeads * kSize * kDim, -1);
  PageArray pages;

  Memory() {
    pages.data = reinterpret_cast<char*>(numbers.data());
    pages.num_pages = kPages;
    pages.kv_heads = kHeads;
    pages.page_size = kSize;
    pages.dim = kDim;
    pages.item_bytes = sizeof(float);
  }
  float at(int slot, int head, int d) const {
    return numbers[((slot / kSize * kHeads + head) * kSize + slot % kSize) * kDim + d];
  }
};

// Tokens in both orders of their last axes, some of them skipped.
void test_write() {
  for (bool transposed : {false, true}) {
    Memory memory;
    const std::vector<int32_t> slots = {7, -1, 0, 19, 3, -1};
    std::vector<float> numbers(2 * kHeads * 3 * kDim);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = float(i);
    Tokens tokens;
    tokens.data = reinterpret_cast<const char*>(numbers.data());
    tokens.batch = 2;
    tokens.tokens = 3;
    const int64_t plain[] = {kHeads * 3 * kDim, 3 * kDim, kDim, 1}, other[] = {kHeads * 3 * kDim, 3 * kDim, 1, 3};
    std::copy_n(transposed ? other : plain, 4, tokens.strides);
    check_slots(memory.pages, slots.data(), 2, 3);
    write_tokens(memory.pages, tokens, slots.data());
    int written = 0;
    for (float x : memory.numbers) written += x >= 0;
    CHECK(written == 4 * kHeads * kDim);
    for (int i = 0; i < 6; ++i)
      for (int head = 0; head < kHeads && slots[i] >= 0; ++head)
        for (int d = 0; d < kDim; ++d) {
          const int64_t* strides = tokens.strides;
          CHECK(memory.at(slots[i], head, d) ==
                float(i / 3 * strides[0] + head * strides[1] + i % 3 * strides[2] + d * strides[3]));
        }
  }
}

void test_copy() {
  Memory memory;
  for (size_t i = 0; i < memory.numbers.size(); ++i) memory.numbers[i] = float(i);
  const std::vector<float> before = memory.numbers;
  copy_pages(memory.pages, {0, 1, 2}, {1, 4, 2});
  const size_t page = kHeads * kSize * kDim;
  for (size_t i = 0; i < page; ++i) {
    CHECK(memory.numbers[page + i] == before[i]);
    CHECK(memory.numbers[4 * page + i] == before[i]);  // in order: page 1 was copied after it was overwritten
    CHECK(memory.numbers[2 * page + i] == before[2 * page + i]);
  }
}

void test_refusals() {
  Memory memory;
  const std::vector<int32_t> slots = {0, 20};
  const std::string text = test::message_of([&] { check_slots(memory.pages, slots.data(), 1, 2); });
  CHECK_WITH(text.find("slot_mapping[0][1] is 20") != std::string::npos, text);
  CHECK(!test::message_of([&] { check_pages(memory.pages, {0, 5}); }).empty());
  CHECK(test::message_of([&] { check_pages(memory.pages, {0, 4}); }).empty());
}

}  // namespace

int main() {
  test_write();
  test_copy();
  test_refusals();
  return test::failures;
}
