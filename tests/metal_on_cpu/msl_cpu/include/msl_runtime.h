// What the shim needs of the runtime: where a thread is, rendezvous with others, threadgroup memory.
#pragma once
#include <cstddef>
#include <cstdint>

#define MSL_UNCHECKED __attribute__((no_sanitize("thread")))

namespace msl {

struct Position {
  uint32_t thread_in_grid[3], thread_in_group[3], group_in_grid[3];
  uint32_t grid[3], groups[3], group_size[3];
  uint32_t lane, simdgroup, thread_index, simdgroups;
};
const Position& position();

// The place in the kernel's source of a function at which threads meet.
struct Site {
  const char* file;
  int line;
  const char* what;
};
#define MSL_SITE const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()

// One meeting of a simdgroup: what each lane brought, and what was made of it by the last to arrive.
struct Exchange {
  alignas(16) unsigned char slot[32][16];
  alignas(16) unsigned char result[16];
  uint32_t mask;  // lanes that exist
};
typedef void (*Combine)(Exchange*);
const Exchange* simdgroup_meet(const void* value, uint32_t size, Combine combine, Site site);
void simdgroup_wait(unsigned flags, Site site);
void threadgroup_wait(unsigned flags, Site site);

void* threadgroup_memory(int id, uint32_t size, const char* name);
template <class T>
T& threadgroup_variable(int id, const char* name) {
  return *static_cast<T*>(threadgroup_memory(id, sizeof(T), name));
}

// Arguments, converted to whatever the kernel declares.
struct Pointer {
  void* to;
  template <class T>
  operator T*() const {
    return static_cast<T*>(to);
  }
};
struct Reference {
  void* to;
  template <class T>
  operator T&() const {
    return *static_cast<T*>(to);
  }
};

}  // namespace msl
