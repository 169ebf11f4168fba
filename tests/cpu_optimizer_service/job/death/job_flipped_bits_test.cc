// One bit of what a process leaves in a state directory is not as it was stored. The next process
// names the file and refuses the job, and changes nothing; or, of what belongs to an undecided step
// alone, names it and has the step done again; or goes on. Its bits are always the right ones.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/checked_word.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/job/death/dying_jobs.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

uint64_t WordAt(const std::string& contents, size_t at) {
  uint64_t word = 0;
  std::memcpy(&word, contents.data() + at, sizeof(word));
  return word;
}

// Bytes of a file, [first, second).
using Bytes = std::pair<size_t, size_t>;

// What of a small file counts: each bit of it is covered. Of planes and gradients none is.
std::vector<Bytes> Covered(const std::string& kind, const std::string& contents) {
  constexpr size_t kHeader = 64;  // Of records and logs.
  if (kind == "table" || kind == "ledger") {
    size_t end = contents.size();
    while (end > 0 && contents[end - 1] == 0) --end;  // The rest of its last page.
    return {{0, (end + 7) / 8 * 8}};
  }
  if (kind == "redo" || kind == "sums") {
    std::vector<Bytes> in_use;
    for (size_t at = 0; at + sizeof(RedoLane) <= contents.size(); at += sizeof(RedoLane)) {
      if (WordAt(contents, at) != 0) in_use.emplace_back(at, at + 16);
    }
    return in_use;
  }
  if (kind == "record" || kind == "identity") {
    const uint64_t half = WordAt(contents, 0) & kCheckedValueMask;
    if (half == 0) return {};
    const uint64_t capacity = WordAt(contents, 8) & kCheckedValueMask;
    const size_t at = kHeader + (half - 1) * ((capacity + 16 + 63) / 64 * 64);
    return {{0, 16}, {at, at + 16 + WordAt(contents, at)}};
  }
  if (kind == "log") {
    const uint64_t tail = WordAt(contents, 8) & kCheckedValueMask;
    return {{0, 16}, {kHeader, kHeader + tail}};
  }
  if (kind == "versions") return {{0, 16 + 4 * (WordAt(contents, 8) & 0xffffffff)}};
  return {};
}

class FlippedBits : public JobDeathTest {
 protected:
  // How many flips of each kind of file ended in which way.
  struct Ends {
    std::map<std::string, int> refused, given_up, unseen;
  };

  // Flips, one by one, every `stride`th bit that is covered of what lies in the directory, from
  // `first` on.
  void FlipEach(const Training& training, const std::string& left, int stride, int first,
                Ends& ends) {
    const std::string expected = Undisturbed(training).substr(0, 64);
    size_t next = first;
    for (const auto& [file, contents] : ReadAll(left)) {
      const std::string kind = KindOf(file);
      for (const auto& [begin, end] : Covered(kind, contents)) {
        // Text and lists of a record: fewer.
        const size_t steps = end - begin > 128 ? 16 * stride : stride;
        for (size_t bit = 8 * begin + next % steps; bit < 8 * end; bit += steps, next += 7) {
          const DirectoryInMemory directory;
          Kept kept;
          kept.directory = directory.path();
          std::filesystem::copy(left, kept.directory);
          std::filesystem::permissions(kept.directory, std::filesystem::perms::owner_all);
          std::fstream out(absl::StrCat(kept.directory, "/", file),
                           std::ios::in | std::ios::out | std::ios::binary);
          out.seekp(static_cast<std::streamoff>(bit / 8));
          out.put(static_cast<char>(contents[bit / 8] ^ (1 << bit % 8)));
          out.close();
          const Files before = ReadAll(kept.directory);
          const Life life = Live(kept, {}, [&](Engine& engine) {
            const std::string hash = Worker(engine, training).Train().substr(0, 64);
            return absl::StrCat(hash, told_at_the_start.empty() ? "" : told_at_the_start[0]);
          });
          SCOPED_TRACE(absl::StrCat("bit ", bit, " of ", file, ": ", life.last, life.result));
          ASSERT_FALSE(life.died);
          const bool names_it = absl::StrContains(
              life.result, file.substr(0, file.find('.')) + "." + std::string(kind));
          if (absl::StartsWith(life.result, "lost: ")) {
            EXPECT_TRUE(names_it);
            EXPECT_FALSE(absl::StrContains(life.result, "\n"));
            EXPECT_EQ(ReadAll(kept.directory), before);
            ++ends.refused[kind];
          } else {
            EXPECT_EQ(life.result.substr(0, 64), expected);
            ++(names_it ? ends.given_up : ends.unseen)[kind];
          }
          if (HasFailure()) return;
        }
      }
    }
  }

  void FlipAfter(const Training& training, const Death& death, Ends& ends) {
    const DirectoryInMemory left;
    Kept kept;
    kept.directory = left.path();
    const Life life = Live(training, kept, death);
    ASSERT_TRUE(life.died) << death.at_store << death.kind << ": " << life.result;
    FlipEach(training, left.path(), kSanitized ? 9973 : 331, static_cast<int>(death.at_store),
             ends);
  }
};

TEST_F(FlippedBits, AreFoundOrNotSeenInTheState) {
  Training training = Small();
  training.micro_steps = 3;
  training.max_norm = 20;
  training.pins = true;
  Ends ends;
  // In first weights; with gradients half added; in an update; between, in two update modes.
  for (const uint64_t at : {40, 75, 110, 145}) {
    if (!kSanitized || at == 110) FlipAfter(training, {.at_store = at}, ends);
  }
  FlipAfter(training, {.at_store = 1, .kind = "a turn of a sum"}, ends);
  training.pins = false;
  FlipAfter(training, {.at_store = 1, .kind = "a lane is taken"}, ends);
  training.spec.update_mode = UpdateMode::kSpeculate;
  training.spec.keep_previous = true;
  FlipAfter(training, {.at_store = 100}, ends);
  if (kSanitized) return;
  for (const uint64_t at : {60, 140}) FlipAfter(training, {.at_store = at}, ends);
  for (const char* kind : {"identity", "record", "table", "redo", "versions"}) {
    EXPECT_GT(ends.refused[kind], 0) << kind;
    EXPECT_EQ(ends.given_up[kind] + ends.unseen[kind], 0) << kind;
  }
  for (const char* kind : {"ledger", "log", "sums"}) EXPECT_GT(ends.given_up[kind], 0) << kind;
  EXPECT_EQ(ends.unseen["ledger"], 0);  // Of a decided step a log says nothing more.
}

}  // namespace
}  // namespace ballast
