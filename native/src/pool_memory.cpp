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

std::mutex mutex;
// Leaked: arrays may die after this library's static objects.
auto& pools = *new std::map<char*, Pool>;

size_t system_page() {
  static const size_t size = sysconf(_SC_PAGESIZE);
  return size;
}

size_t round_up(size_t bytes) {
  return (bytes + system_page() - 1) / system_page() * system_page();
}

// One system page before the pool is usable too: mlx's allocator keeps a buffer's size in front of it.
size_t header() {
  return system_page();
}

bool make_usable(char* from, size_t bytes) {
  return bytes == 0 || mprotect(from, bytes, PROT_READ | PROT_WRITE) == 0;
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
  void* base = MAP_FAILED;
  for (;; capacity = std::max(bytes, round_up(capacity / 2))) {
    // Without access rights, address space counts towards no limit but its own.
    base = mmap(nullptr, header() + capacity, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED || capacity == bytes) break;
  }
  if (base == MAP_FAILED) throw std::bad_alloc();
  if (!make_usable(static_cast<char*>(base), header() + bytes)) {
    munmap(base, header() + capacity);
    throw std::bad_alloc();
  }
  char* pool = static_cast<char*>(base) + header();
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
    if (!make_usable(found->first + known.usable, bytes - known.usable)) throw std::bad_alloc();
    known.usable = bytes;
  }
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
  munmap(found->first - header(), header() + found->second.capacity);
  pools.erase(found);
}

void give_back(void* from, size_t bytes) {
  const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(from));
  const uintptr_t end = (reinterpret_cast<uintptr_t>(from) + bytes) / system_page() * system_page();
  if (begin >= end) return;
#if defined(__linux__)
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#else
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_FREE);
#endif
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
