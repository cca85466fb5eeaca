#include "pool_memory.h"

#include <cstdlib>
#include <cstring>

#include "check.h"

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

// Memory behind the new end goes back to the system, and is there again, as zeros, when the pool grows.
void test_shrinking() {
  char* pool = static_cast<char*>(reserve_pool(32 * kMiB, 64 * kMiB));
  std::memset(pool, 1, 32 * kMiB);
  CHECK(pool_bytes().committed == 32 * kMiB);
  CHECK(resize_pool(pool, 3 * kMiB + 5));
  const PoolBytes bytes = pool_bytes();
  CHECK(bytes.usable == bytes.committed);
  CHECK(bytes.usable >= 3 * kMiB + 5 && bytes.usable < 4 * kMiB);
  CHECK(resize_pool(pool, 32 * kMiB));
  CHECK(pool_bytes().committed < 4 * kMiB);
  CHECK(pool[3 * kMiB + 4] == 1);
  CHECK(pool[4 * kMiB] == 0);
  std::memset(pool, 2, 32 * kMiB);
  release_pool(pool);
}

}  // namespace

int main() {
  test_growth();
  test_large();
  test_shrinking();
  return test::failures;
}
