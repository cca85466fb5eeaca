#pragma once
// A test is a program that returns the number of failed checks.
#include <cstdio>
#include <stdexcept>
#include <string>

namespace test {

inline int failures = 0;

inline void check(bool right, const std::string& what, const char* file, int line) {
  if (right) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

// The message of the std::exception that `body` throws; "" if it throws none.
template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace test

#define CHECK(condition) test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_WITH(condition, text) \
  test::check((condition), std::string(#condition) + ": " + (text), __FILE__, __LINE__)
