// Random numbers that are the same on every machine for the same seed.
#ifndef BALLAST_TESTS_HISTORIES_RANDOM_H_
#define BALLAST_TESTS_HISTORIES_RANDOM_H_

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace ballast::histories {

// splitmix64's finisher: neighbouring inputs give unrelated outputs.
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed)) {}

  uint64_t Next() { return Mix(state_++); }
  // From 0 to count - 1.
  int Below(int count) { return static_cast<int>(Next() % static_cast<uint64_t>(count)); }
  int Between(int least, int most) { return least + Below(most - least + 1); }
  // True once in `times`, on average.
  bool OneIn(int times) { return Below(times) == 0; }
  template <typename T>
  T Pick(std::initializer_list<T> choices) {
    return choices.begin()[Below(static_cast<int>(choices.size()))];
  }
  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (int i = static_cast<int>(items.size()) - 1; i > 0; --i) {
      std::swap(items[i], items[Below(i + 1)]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_RANDOM_H_
