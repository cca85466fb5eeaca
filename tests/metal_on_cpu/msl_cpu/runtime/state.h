// The state of one run, shared by the parts of the runtime. One run at a time in a process.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fibers.h"
#include "msl_runtime.h"

namespace msl {

constexpr int MOST_THREADS = 1024;
constexpr uint32_t THREADGROUP_BYTES = 32768;

// An argument. `kind`: 0 input, 1 output, 2 output with a given first value, 3 input written in place.
struct Buffer {
  char* data;
  size_t bytes;
  const char* name;
  uint32_t item;
  int kind;
  uint64_t bytes_read, bytes_written;
};

enum class State : uint8_t { ready, waiting_simdgroup, waiting_threadgroup, done };
struct Simdgroup;

struct Thread {
  void* stack_pointer;
  Position position;
  State state;
  Simdgroup* simdgroup;
  Site site;
  uint32_t index;
  char* stack;
};

struct Simdgroup {
  Thread* lane[32];
  int lanes, arrived;
  uint32_t phase, epoch;  // epoch: barriers of this simdgroup that order memory
  bool finished;          // some lane has returned
  Thread* first;          // of those that wait, the first to come
  Exchange exchange[2];
};

struct Variable {
  uint32_t offset, size;
  const char* name;
};

struct Run {
  void (*entry)(void**);
  void** arguments;
  std::vector<Buffer> buffers;
  uint32_t schedule;
  uint32_t group;            // number of the threadgroup, from 1
  uint32_t group_epoch;      // barriers that order threadgroup memory
  uint32_t device_epoch;     // barriers that order device memory
  int threads, simdgroups, arrived, finished;
  Thread* first;  // of those that wait at a threadgroup barrier, the first to come
  std::vector<Variable> variables;
  std::vector<int> variable_of;
  uint32_t arena_top, threadgroup_bytes;
  bool failed;
  int problems;
  std::string report;
  uint64_t meetings;
};

extern Run run;
extern Thread threads[MOST_THREADS];
extern Simdgroup simdgroups[32];
extern Thread* current;
extern char arena[2 * THREADGROUP_BYTES];
extern char* stacks;
extern void* main_stack;

// Adds a line to the report.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string where(const Thread* thread);
[[noreturn]] void give_up();  // back to the caller; the run has failed
void fiber_start();
void install_fault_handlers();
void remove_fault_handlers();

// Hooks of the checker; without it they do nothing.
void check_begin_run();
void check_begin_group();
void check_end_run();
void check_pause(bool paused);

}  // namespace msl
