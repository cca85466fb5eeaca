#include "thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "check.h"

using namespace tinykv;

namespace {

// Every item once, job after job.
void test_items() {
  ThreadPool::set_threads(4);
  for (int items : {0, 1, 2, 7, 1000}) {
    for (int job = 0; job < 200; ++job) {
      std::vector<std::atomic<int>> calls(items);
      ThreadPool::instance().run(items, [&](int item) { calls[item].fetch_add(1); });
      for (auto& count : calls) CHECK(count == 1);
    }
  }
}

// Jobs from several threads at once: each gets its own items.
void test_callers() {
  std::vector<std::thread> callers;
  std::vector<long> sums(4);
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int job = 0; job < 300; ++job) {
        std::atomic<long> sum{0};
        ThreadPool::instance().run(50, [&](int item) { sum += item; });
        sums[caller] += sum;
      }
    });
  for (auto& caller : callers) caller.join();
  for (long sum : sums) CHECK(sum == 300 * 49 * 25);
}

// Threads don't survive a fork; the child's pool is a new one that works.
void test_fork() {
#if defined(__SANITIZE_THREAD__)
  return;  // TSan can't start threads in a forked child
#endif
  if (std::getenv("TINYKV_EMULATED")) return;  // QEMU can't either
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> sum{0};
    for (int job = 0; job < 100; ++job) ThreadPool::instance().run(10, [&](int item) { sum += item; });
    _exit(sum == 4500 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  test_items();
}

// An idle pool takes no time of the processor.
void test_idle() {
  const auto used = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = used();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(used() - before < 0.02);
}

// What a job costs that is nothing but its start and end; printed, as it depends on the machine.
void time_start() {
  using Clock = std::chrono::steady_clock;
  ThreadPool::set_threads(0);
  std::vector<double> microseconds;
  for (int job = 0; job < 2000; ++job) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));  // the workers are asleep again
    const auto begin = Clock::now();
    ThreadPool::instance().run(2, [](int) {});
    microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::nth_element(microseconds.begin(), microseconds.begin() + 1000, microseconds.end());
  std::printf("a job of nothing, with sleeping workers: %.1f us (median)\n", microseconds[1000]);
}

}  // namespace

int main() {
  test_items();
  test_callers();
  test_fork();
  test_idle();
  time_start();
  return test::failures;
}
