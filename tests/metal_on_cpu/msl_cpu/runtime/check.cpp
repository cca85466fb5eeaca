// The checker: what the compiler's thread sanitizer instrumentation calls at each access of a kernel's memory.
//
// Without MSL_CHECK there is no instrumentation, and the hooks do nothing. Reported once for each pair of places in
// the code: accesses outside of every buffer, writes to inputs, reads of what nobody wrote, races, outputs that no
// thread wrote.
#include "state.h"

#ifndef MSL_CHECK
namespace msl {
void check_begin_run() {}
void check_begin_group() {}
void check_end_run() {}
void check_pause(bool) {}
}  // namespace msl
#else
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <set>

extern "C" char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));

namespace msl {

// The last write and read of one element of an output, or one byte of threadgroup memory.
struct Access {
  void* code;
  uint32_t thread;  // index + 1; 0: none, SEVERAL: more than one
  uint32_t group, group_epoch, simdgroup_epoch;
};
struct Cell {
  Access write, read;
  bool filled;
};
constexpr uint32_t SEVERAL = ~0u;

static Cell arena_cells[sizeof arena];
static std::vector<std::vector<Cell>> buffer_cells;
static std::set<std::pair<void*, void*>> reported;
static bool paused = true;

void check_pause(bool pause) { paused = pause; }

void check_begin_run() {
  memset(static_cast<void*>(arena_cells), 0, sizeof arena_cells);
  reported.clear();
  buffer_cells.clear();
  for (const Buffer& buffer : run.buffers) {
    buffer_cells.emplace_back(buffer.kind ? (buffer.bytes + buffer.item - 1) / buffer.item : 0);
    if (buffer.kind >= 2) {
      for (Cell& cell : buffer_cells.back()) cell.filled = true;
    }
  }
}

void check_begin_group() { memset(static_cast<void*>(arena_cells), 0, sizeof(Cell) * run.arena_top); }

void check_end_run() {
  for (size_t i = 0; i < run.buffers.size(); i++) {
    if (run.buffers[i].kind != 1) continue;
    size_t missing = 0, first = 0;
    for (size_t k = 0; k < buffer_cells[i].size(); k++) {
      if (!buffer_cells[i][k].filled && missing++ == 0) first = k;
    }
    if (missing) {
      say("NEVER WRITTEN: %zu of %zu elements of output '%s', the first is %zu", missing, buffer_cells[i].size(),
          run.buffers[i].name, first);
    }
  }
}

static std::string place(void* code) {
  Dl_info found;
  char text[400];
  if (code != nullptr && dladdr(code, &found)) {
    snprintf(text, sizeof text, "@%s+0x%lx", found.dli_fname,
             (unsigned long)(static_cast<char*>(code) - static_cast<char*>(found.dli_fbase)) - 1);
  } else {
    snprintf(text, sizeof text, "@%p", code);
  }
  return text;
}

static bool first_time(void* a, void* b) { return reported.insert({a, b}).second; }

// Whether an earlier access is over, for the current thread: its own, or before a barrier for both that orders it.
static bool over(const Access& earlier, bool device) {
  if (earlier.group != run.group) return false;
  if (earlier.thread == current->index + 1) return true;
  if (earlier.group_epoch < (device ? run.device_epoch : run.group_epoch)) return true;
  if (earlier.thread == SEVERAL) return false;
  const Simdgroup* theirs = threads[earlier.thread - 1].simdgroup;
  return theirs == current->simdgroup && earlier.simdgroup_epoch < theirs->epoch;
}

static void race(const Access& earlier, bool earlier_wrote, bool write, void* code, const char* name, size_t offset) {
  if (!first_time(code, earlier.code)) return;
  char who[80];
  if (earlier.thread == SEVERAL) {
    snprintf(who, sizeof who, "several threads");
  } else {
    snprintf(who, sizeof who, "thread %u%s", earlier.thread - 1,
             earlier.group == run.group ? "" : " of another threadgroup");
  }
  say("RACE on '%s' at byte %zu: %s by %s %s, and %s by %s %s", name, offset, write ? "written" : "read",
      where(current).c_str(), place(code).c_str(), earlier_wrote ? "written" : "read", who,
      place(earlier.code).c_str());
}

static void touch(Cell& cell, bool write, void* code, const char* name, size_t offset, bool device) {
  const Access now = {code, current->index + 1, run.group, device ? run.device_epoch : run.group_epoch,
                      current->simdgroup->epoch};
  if (cell.write.thread && !over(cell.write, device)) race(cell.write, true, write, code, name, offset);
  const bool read_pending = cell.read.thread && !over(cell.read, device);
  if (write) {
    if (read_pending) race(cell.read, false, write, code, name, offset);
    cell.write = now;
    cell.read.thread = 0;
    cell.filled = true;
  } else {
    cell.read = now;
    if (read_pending) cell.read.thread = SEVERAL;
  }
}

static void in_arena(uint32_t offset, size_t size, bool write, void* code) {
  for (const Variable& variable : run.variables) {
    if (offset < variable.offset || offset + size > variable.offset + variable.size) continue;
    for (size_t i = 0; i < size; i++) {
      Cell& cell = arena_cells[offset + i];
      if (!write && !cell.filled && first_time(code, nullptr)) {
        say("NOT INITIALISED: threadgroup '%s' at byte %zu read by %s %s", variable.name,
            size_t(offset + i - variable.offset), where(current).c_str(), place(code).c_str());
      }
      touch(cell, write, code, variable.name, offset + i - variable.offset, false);
    }
    return;
  }
  say("OUT OF BOUNDS: threadgroup memory %s by %s %s", write ? "written" : "read", where(current).c_str(),
      place(code).c_str());
  give_up();
}

static void in_buffer(size_t index, size_t offset, size_t size, bool write, void* code) {
  Buffer& buffer = run.buffers[index];
  (write ? buffer.bytes_written : buffer.bytes_read) += size;
  if (buffer.kind == 0) {
    if (write) {
      say("INPUT WRITTEN: '%s' at byte %zu by %s %s", buffer.name, offset, where(current).c_str(),
          place(code).c_str());
      give_up();
    }
    return;
  }
  for (size_t i = offset / buffer.item; i * buffer.item < offset + size; i++) {
    Cell& cell = buffer_cells[index][i];
    if (!write && !cell.filled && first_time(code, nullptr)) {
      say("NOT INITIALISED: output '%s' at element %zu read by %s %s", buffer.name, i, where(current).c_str(),
          place(code).c_str());
    }
    touch(cell, write, code, buffer.name, i * buffer.item, true);
  }
}

static void access(const void* address, size_t size, bool write, void* code) {
  if (paused) return;
  const char* a = static_cast<const char*>(address);
  if (a >= current->stack && a + size <= current->stack + STACK_BYTES) return;
  if (a >= arena && a < arena + sizeof arena) return in_arena(uint32_t(a - arena), size, write, code);
  for (size_t i = 0; i < run.buffers.size(); i++) {
    const Buffer& buffer = run.buffers[i];
    if (a >= buffer.data && a + size <= buffer.data + buffer.bytes) {
      return in_buffer(i, a - buffer.data, size, write, code);
    }
  }
  // Positions of threads, the table of arguments, and constants of the kernel.
  if (!write && a >= &__ehdr_start && a + size <= &_end) return;
  if (!write && a >= (char*)run.arguments && a + size <= (char*)(run.arguments + run.buffers.size())) return;
  Dl_info found, kernel;
  if (!write && dladdr(a, &found) && dladdr(reinterpret_cast<void*>(run.entry), &kernel) &&
      found.dli_fbase == kernel.dli_fbase) {
    return;
  }
  const Buffer* nearest = nullptr;
  for (const Buffer& buffer : run.buffers) {
    const ptrdiff_t offset = a - buffer.data;
    if (offset >= -(ptrdiff_t(1) << 30) && offset < ptrdiff_t(buffer.bytes) + (ptrdiff_t(1) << 30)) nearest = &buffer;
  }
  if (a >= stacks && a < stacks + STACK_BYTES * MOST_THREADS) {
    say("OUT OF BOUNDS: another thread's memory %s by %s %s", write ? "written" : "read", where(current).c_str(),
        place(code).c_str());
  } else {
    say("OUT OF BOUNDS: buffer '%s' %s at byte %td of %zu by %s %s", nearest ? nearest->name : "?",
        write ? "written" : "read", nearest ? a - nearest->data : 0, nearest ? nearest->bytes : size_t(0),
        where(current).c_str(), place(code).c_str());
  }
  give_up();
}

}  // namespace msl

#define CODE __builtin_return_address(0)
#define HOOKS(size)                                                                                    \
  void __tsan_read##size(void* a) { msl::access(a, size, false, CODE); }                               \
  void __tsan_write##size(void* a) { msl::access(a, size, true, CODE); }                               \
  void __tsan_unaligned_read##size(void* a) { msl::access(a, size, false, CODE); }                     \
  void __tsan_unaligned_write##size(void* a) { msl::access(a, size, true, CODE); }                     \
  void __tsan_read_write##size(void* a) { msl::access(a, size, false, CODE), msl::access(a, size, true, CODE); } \
  void __tsan_unaligned_read_write##size(void* a) { __tsan_read_write##size(a); }
extern "C" {
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* a, unsigned long size) { msl::access(a, size, false, CODE); }
void __tsan_write_range(void* a, unsigned long size) { msl::access(a, size, true, CODE); }
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  msl::access(from, size, false, CODE);
  msl::access(to, size, true, CODE);
  return memcpy(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  msl::access(to, size, true, CODE);
  return memset(to, value, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  msl::access(from, size, false, CODE);
  msl::access(to, size, true, CODE);
  return memmove(to, from, size);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
#endif
