#include "pool_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace tinykv {
namespace {

struct Pool {
  size_t usable;
  size_t capacity;
};

// Large pools get the system's huge pages: pages in random order need fewer entries of the processor's page table
// cache, and attention reads them 8 % faster. Small pools don't: a few tokens would take 2 MiB.
constexpr size_t kHugePage = 2 << 20;
[[maybe_unused]] constexpr size_t kLargePool = 8 << 20;

std::mutex mutex;
// Leaked: arrays may die after this library's static objects.
auto& pools = *new std::map<char*, Pool>;

size_t system_page() {
  static const size_t size = sysconf(_SC_PAGESIZE);
  return size;
}

size_t round_up(size_t bytes, size_t to = system_page()) {
  return (bytes + to - 1) / to * to;
}

// Address space before a pool. Its last system page is usable too: mlx's allocator keeps a buffer's size there.
constexpr size_t kHeader = kHugePage;

bool make_usable(char* pool, size_t bytes) {
  if (mprotect(pool - system_page(), system_page() + bytes, PROT_READ | PROT_WRITE) != 0) return false;
#if defined(MADV_HUGEPAGE)
  if (bytes >= kLargePool) madvise(pool, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return true;
}

// Arrays that still have the old size stay readable; what they hold there is undefined.
void give_back(char* from, size_t bytes) {
#if defined(__linux__)
  madvise(from, bytes, MADV_DONTNEED);
#else
  madvise(from, bytes, MADV_FREE);
#endif
}

size_t resident(char* from, size_t bytes) {
#if defined(__linux__)
  using Residency = unsigned char;
#else
  using Residency = char;
#endif
  std::vector<Residency> residency(bytes / system_page());
  if (bytes == 0 || mincore(from, bytes, residency.data()) != 0) return 0;
  return system_page() * std::count_if(residency.begin(), residency.end(), [](Residency page) { return page & 1; });
}

}  // namespace

void* reserve_pool(size_t bytes, size_t capacity) {
  bytes = round_up(std::max<size_t>(bytes, 1));
  capacity = std::max(bytes, round_up(capacity));
  void* space = MAP_FAILED;
  for (;; capacity = std::max(bytes, round_up(capacity / 2))) {
    // Without access rights, address space counts towards no limit but its own.
    space = mmap(nullptr, 2 * kHeader + capacity, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (space != MAP_FAILED || capacity == bytes) break;
  }
  if (space == MAP_FAILED) throw std::bad_alloc();
  // The pool begins at a huge page's border; what isn't needed for that goes back.
  char* const mapped = static_cast<char*>(space);
  char* const pool = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(mapped) + system_page(), kHeader));
  char* const base = pool - system_page();
  if (base > mapped) munmap(mapped, base - mapped);
  munmap(pool + capacity, mapped + 2 * kHeader - pool);
  if (!make_usable(pool, bytes)) {
    munmap(base, system_page() + capacity);
    throw std::bad_alloc();
  }
  std::lock_guard<std::mutex> lock(mutex);
  pools[pool] = {bytes, capacity};
  return pool;
}

bool resize_pool(void* pool, size_t bytes) {
  bytes = round_up(std::max<size_t>(bytes, 1));
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools.find(static_cast<char*>(pool));
  if (found == pools.end() || bytes > found->second.capacity) return false;
  Pool& known = found->second;
  if (bytes > known.usable) {
    if (!make_usable(found->first, bytes)) throw std::bad_alloc();
  } else if (bytes < known.usable) {
    give_back(found->first + bytes, known.usable - bytes);
  }
  known.usable = bytes;
  return true;
}

size_t pool_capacity(const void* pool) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools.find(static_cast<char*>(const_cast<void*>(pool)));
  return found == pools.end() ? 0 : found->second.capacity;
}

void release_pool(void* pool) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools.find(static_cast<char*>(pool));
  if (found == pools.end()) return;
  munmap(found->first - system_page(), system_page() + found->second.capacity);
  pools.erase(found);
}

PoolBytes pool_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  PoolBytes total{0, 0, 0};
  for (const auto& [pool, known] : pools) {
    total.reserved += known.capacity;
    total.usable += known.usable;
    total.committed += resident(pool, known.usable);
  }
  return total;
}

}  // namespace tinykv
