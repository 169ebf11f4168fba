#include "cpu_optimizer_service/state/element_runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace ballast {
namespace {

using testing::ElementsAre;
using Pieces = std::vector<std::pair<int64_t, int64_t>>;

Pieces PiecesOf(const ElementRuns& runs, int64_t offset, int64_t elements) {
  Pieces pieces;
  runs.VisitRange(offset, elements,
                  [&](int64_t begin, int64_t size) { pieces.emplace_back(begin, size); });
  return pieces;
}

TEST(ElementRuns, AreOneForSomeColumnsOfAMatrix) {
  ElementRuns runs;
  for (int64_t row = 0; row < 100; ++row) runs.Add(20 * row + 5, 10);
  EXPECT_THAT(runs.runs(),
              ElementsAre(ElementRun{.begin = 5, .elements = 10, .count = 100, .stride = 20}));
  EXPECT_EQ(runs.elements(), 1000);
  EXPECT_EQ(PiecesOf(runs, 18, 14), (Pieces{{33, 2}, {45, 10}, {65, 2}}));
}

TEST(ElementRuns, AreOneForWhatLiesTogether) {
  ElementRuns runs;
  for (int64_t row = 0; row < 10; ++row) runs.Add(7 + 3 * row, 3);
  EXPECT_THAT(runs.runs(), ElementsAre(ElementRun{.begin = 7, .elements = 30}));
}

TEST(ElementRuns, HaveWhatWasAddedInAnyPieces) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 200; ++turn) {
    ElementRuns runs;
    std::vector<int64_t> added;
    int64_t at = 0;
    for (int piece = 0; piece < 20; ++piece) {
      at += static_cast<int64_t>(random() % 3);
      const auto elements = 1 + static_cast<int64_t>(random() % 3);
      runs.Add(at, elements);
      for (int64_t i = 0; i < elements; ++i) added.push_back(at++);
    }
    ElementRuns read;
    ASSERT_TRUE(read.Read(runs.runs()));
    ASSERT_EQ(read.elements(), static_cast<int64_t>(added.size()));
    for (int64_t begin = 0; begin < read.elements(); ++begin) {
      std::vector<int64_t> visited;
      read.VisitRange(begin, read.elements() - begin, [&](int64_t from, int64_t elements) {
        for (int64_t i = 0; i < elements; ++i) visited.push_back(from + i);
      });
      ASSERT_EQ(visited, std::vector<int64_t>(added.begin() + begin, added.end()));
    }
  }
}

TEST(ElementRuns, ThatNoCutLeavesAreRefused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const ElementRun& run :
       {ElementRun{.begin = -1, .elements = 1}, ElementRun{.begin = 0, .elements = 0},
        ElementRun{.begin = 0, .elements = 1, .count = 0},
        ElementRun{.begin = 0, .elements = kMost, .count = 2},
        ElementRun{.begin = 0, .elements = 1, .count = kMost, .stride = 1},
        ElementRun{.begin = 0, .elements = 1, .count = 1000, .stride = kMost},
        ElementRun{.begin = kMost, .elements = 1}}) {
    ElementRuns runs;
    EXPECT_FALSE(runs.Read({&run, 1}));
  }
}

}  // namespace
}  // namespace ballast
