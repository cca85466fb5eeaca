// Rendezvous of threads: simdgroup functions and barriers, and who runs next.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>

#include "state.h"

namespace msl {

Run run;
Thread threads[MOST_THREADS];
Simdgroup simdgroups[32];
Thread* current;
alignas(64) char arena[2 * THREADGROUP_BYTES];
char* stacks;
void* main_stack;

const Position& position() { return current->position; }

void say(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (run.problems++ < 20) {
    run.report += line;
    run.report += "\n";
  }
}

std::string where(const Thread* thread) {
  char text[160];
  const Position& p = thread->position;
  snprintf(text, sizeof text, "thread %u of threadgroup (%u, %u, %u), lane %u of simdgroup %u", thread->index,
           p.group_in_grid[0], p.group_in_grid[1], p.group_in_grid[2], p.lane, p.simdgroup);
  return text;
}

void give_up() {
  run.failed = true;
  void* nowhere;
  msl_switch(&nowhere, main_stack);
  __builtin_unreachable();
}

// The next thread that can run: the lanes of the own simdgroup first, then other simdgroups. Schedule 0 takes them in
// ascending order, 1 in descending order.
static Thread* next_ready() {
  const int step = run.schedule & 1 ? -1 : 1;
  Simdgroup* own = current->simdgroup;
  for (int i = 1; i <= own->lanes; i++) {
    const int lane = (int(current->position.lane) + step * i + 2 * own->lanes) % own->lanes;
    if (own->lane[lane]->state == State::ready) return own->lane[lane];
  }
  const int first = int(own - simdgroups);
  for (int i = 1; i < run.simdgroups; i++) {
    Simdgroup& other = simdgroups[(first + step * i + run.simdgroups) % run.simdgroups];
    for (int lane = 0; lane < other.lanes; lane++) {
      Thread* thread = other.lane[step > 0 ? lane : other.lanes - 1 - lane];
      if (thread->state == State::ready) return thread;
    }
  }
  return nullptr;
}

static void leave() {
  Thread* next = next_ready();
  if (next == nullptr) {
    say("DIVERGENCE: no thread of threadgroup (%u, %u, %u) can go on", current->position.group_in_grid[0],
        current->position.group_in_grid[1], current->position.group_in_grid[2]);
    std::set<std::string> lines;
    for (int i = 0; i < run.threads; i++) {
      const Thread& thread = threads[i];
      char line[300];
      if (thread.state == State::done) {
        snprintf(line, sizeof line, "  simdgroup %u: lanes have returned\n", thread.position.simdgroup);
      } else {
        snprintf(line, sizeof line, "  simdgroup %u: lanes wait in %s at %s:%d\n", thread.position.simdgroup,
                 thread.site.what, thread.site.file, thread.site.line);
      }
      lines.insert(line);
    }
    for (const std::string& line : lines) run.report += line;
    give_up();
  }
  Thread* before = current;
  if (next != before) {
    current = next;
    msl_switch(&before->stack_pointer, next->stack_pointer);
  }
}

static void check_all_there(bool some_finished, const Site& site) {
  if (some_finished) {
    say("DIVERGENCE: %s at %s:%d after other threads have returned, by %s", site.what, site.file, site.line,
        where(current).c_str());
    give_up();
  }
}

// Threads that meet must be at the same place in the source; `first` came first.
static void check_same_site(const Thread* first, const Site& site) {
  if (first->site.line != site.line || strcmp(first->site.what, site.what) != 0) {
    say("DIVERGENCE: %s at %s:%d by %s, while %s waits in %s at %s:%d", site.what, site.file, site.line,
        where(current).c_str(), where(first).c_str(), first->site.what, first->site.file, first->site.line);
    give_up();
  }
}

// Waits until every lane is here; the last one runs `combine` and wakes the others.
static void simdgroup_arrive(Exchange* exchange, Combine combine, bool orders, const Site& site) {
  Simdgroup* group = current->simdgroup;
  check_all_there(group->finished, site);
  current->site = site;
  if (group->arrived == 0) group->first = current;
  check_same_site(group->first, site);
  if (++group->arrived < group->lanes) {
    current->state = State::waiting_simdgroup;
    leave();
    return;
  }
  group->arrived = 0;
  group->phase++;
  run.meetings++;
  if (orders) group->epoch++;
  if (exchange != nullptr) {
    exchange->mask = group->lanes == 32 ? 0xffffffffu : (1u << group->lanes) - 1;
    if (combine != nullptr) {
      check_pause(true);
      combine(exchange);
      check_pause(false);
    }
  }
  for (int lane = 0; lane < group->lanes; lane++) group->lane[lane]->state = State::ready;
}

const Exchange* simdgroup_meet(const void* value, uint32_t size, Combine combine, Site site) {
  // Two exchanges in turn: a lane may still read the last one while another brings its next value.
  Exchange* exchange = &current->simdgroup->exchange[current->simdgroup->phase & 1];
  memcpy(exchange->slot[current->position.lane], value, size);
  simdgroup_arrive(exchange, combine, false, site);
  return exchange;
}

void simdgroup_wait(unsigned flags, Site site) { simdgroup_arrive(nullptr, nullptr, flags != 0, site); }

void threadgroup_wait(unsigned flags, Site site) {
  check_all_there(run.finished > 0, site);
  current->site = site;
  if (run.arrived == 0) run.first = current;
  check_same_site(run.first, site);
  if (++run.arrived < run.threads) {
    current->state = State::waiting_threadgroup;
    leave();
    return;
  }
  run.arrived = 0;
  if (flags & 2) run.group_epoch++;
  if (flags & 1) run.device_epoch++;
  for (int i = 0; i < run.threads; i++) threads[i].state = State::ready;
}

void fiber_start() {
  run.entry(run.arguments);
  current->state = State::done;
  current->simdgroup->finished = true;
  if (++run.finished == run.threads) {
    void* nowhere;
    msl_switch(&nowhere, main_stack);
  }
  leave();
  __builtin_unreachable();
}

void* threadgroup_memory(int id, uint32_t size, const char* name) {
  if (id >= int(run.variable_of.size())) run.variable_of.resize(id + 1, -1);
  if (run.variable_of[id] < 0) {
    const uint32_t offset = (run.arena_top + 63) / 64 * 64 + 64;  // apart, so that an overrun hits nothing
    run.threadgroup_bytes += (size + 15) / 16 * 16;
    if (run.threadgroup_bytes > THREADGROUP_BYTES || offset + size > sizeof arena) {
      say("THREADGROUP MEMORY: %u bytes with '%s', 32768 are there", run.threadgroup_bytes, name);
      give_up();
    }
    run.variable_of[id] = int(run.variables.size());
    run.variables.push_back({offset, size, name});
    run.arena_top = offset + size;
  }
  return arena + run.variables[run.variable_of[id]].offset;
}

}  // namespace msl
