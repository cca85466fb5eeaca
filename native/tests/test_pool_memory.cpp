#include "pool_memory.h"

#include <cstdlib>
#include <cstring>

#include "check.h"
#include "page_io.h"

using namespace tinykv;

namespace {

constexpr size_t kMiB = 1 << 20;

void test_growth() {
  char* pool = static_cast<char*>(reserve_pool(kMiB, 64 * kMiB));
  std::memset(pool, 1, kMiB);
  CHECK(pool_capacity(pool) == 64 * kMiB);
  CHECK(resize_pool(pool, 32 * kMiB));
  CHECK(pool[kMiB - 1] == 1);
  CHECK(pool[kMiB] == 0);
  pool[32 * kMiB - 1] = 2;
  CHECK(!resize_pool(pool, 65 * kMiB));
  const PoolBytes bytes = pool_bytes();
  CHECK(bytes.reserved == 64 * kMiB);
  CHECK(bytes.usable == 32 * kMiB);
  CHECK(bytes.committed >= kMiB && bytes.committed < 8 * kMiB);
  release_pool(pool);
  CHECK(pool_bytes().reserved == 0);
  CHECK(pool_capacity(pool) == 0);
}

// More address space than there is: what is needed is had all the same.
void test_large() {
  if (std::getenv("TINYKV_EMULATED") != nullptr) return;  // QEMU keeps books on each page of it
  void* pool = reserve_pool(kMiB, size_t(1) << 60);
  CHECK(pool_capacity(pool) >= kMiB);
  release_pool(pool);
}

void test_discard() {
  PageArray pages;
  pages.num_pages = 64;
  pages.kv_heads = 3;
  pages.page_size = 16;
  pages.dim = 40;
  pages.item_bytes = 2;
  const size_t bytes = pages.num_pages * pages.page_bytes();
  pages.data = static_cast<char*>(reserve_pool(bytes, bytes));
  std::memset(pages.data, 1, bytes);
  const size_t before = pool_bytes().committed;
  std::vector<int> ids;
  for (int id = 59; id >= 8; --id) ids.push_back(id);
  discard_pages(pages, ids);
  CHECK(pool_bytes().committed < before / 2);
  for (size_t i = 0; i < bytes; ++i)
    if (i / pages.page_bytes() < 8 || i / pages.page_bytes() > 59) CHECK(pages.data[i] == 1);
  std::memset(pages.data, 2, bytes);
  release_pool(pages.data);
}

}  // namespace

int main() {
  test_growth();
  test_large();
  test_discard();
  return test::failures;
}
