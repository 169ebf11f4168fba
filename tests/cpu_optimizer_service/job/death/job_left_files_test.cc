// What a process leaves in a state directory, with a file taken away or a word of it changed: the
// next process says so and touches nothing, or does without it and has the same bits.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"
#include "cpu_optimizer_service/state/slot_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/job/death/dying_jobs.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class LeftFiles : public JobDeathTest {
 protected:
  struct LaneInUse {
    std::string file;
    size_t at = 0;
    RedoLane lane;
  };

  // As it was left, in a directory of its own.
  struct Copy {
    Copy() { kept.directory = directory.path(); }
    explicit Copy(const std::string& left) : Copy() {
      std::filesystem::copy(left, kept.directory);
      std::filesystem::permissions(kept.directory, std::filesystem::perms::owner_all);
    }
    Copy(const std::string& left, const LaneInUse& lane, const RedoWord& word, uint64_t tag)
        : Copy(left) {
      const uint64_t words[] = {word.Pack(), tag};
      std::fstream out(PathOf(lane.file), std::ios::in | std::ios::out | std::ios::binary);
      out.seekp(static_cast<std::streamoff>(lane.at));
      out.write(reinterpret_cast<const char*>(words), sizeof(words));
    }
    std::string PathOf(const std::string& file) const {
      return absl::StrCat(kept.directory, "/", file);
    }
    DirectoryInMemory directory;
    Kept kept;
  };

  // The first that has recorded a turn.
  static std::optional<LaneInUse> FindLane(const Files& files, absl::string_view kind) {
    LaneInUse found;
    for (const auto& [file, contents] : files) {
      if (KindOf(file) != kind) continue;
      found.file = file;
      for (found.at = 0; found.at < contents.size(); found.at += sizeof(RedoLane)) {
        contents.copy(reinterpret_cast<char*>(&found.lane), sizeof(RedoLane), found.at);
        if (found.lane.word != 0 && RedoWord::Unpack(found.lane.word).done > 0) return found;
      }
    }
    return std::nullopt;
  }
  // In a word there may be any chunk, and any number of its elements.
  static std::vector<std::pair<RedoWord, uint64_t>> WrongLanes(const LaneInUse& in_use) {
    const RedoWord word = RedoWord::Unpack(in_use.lane.word);
    RedoWord no_chunk = word, too_far = word, too_much = word, before_the_begin = word;
    no_chunk.chunk ^= uint32_t{1} << 20;
    too_far.done ^= int64_t{1} << 19;
    too_much.count = 255;
    before_the_begin.done = word.count - 1;
    const uint64_t tag = in_use.lane.tag;
    return {
        {no_chunk, tag}, {too_far, tag}, {too_much, tag}, {before_the_begin, tag}, {word, tag ^ 4}};
  }

  // The first instant of which `is_meant`, as the directory shows it.
  std::string Leave(const Training& training, const DirectoryInMemory& directory,
                    const std::function<bool(const Files&)>& is_meant) {
    for (uint64_t at = 1;; at += 2) {
      std::filesystem::remove_all(directory.path());
      Kept kept;
      kept.directory = directory.path();
      if (!Live(training, kept, {.at_store = at}).died) break;
      if (is_meant(ReadAll(directory.path()))) return directory.path();
    }
    ADD_FAILURE() << "no process died in such an instant";
    return directory.path();
  }

  // A process with these files takes the job over and goes on to the end with the same bits, or
  // refuses it by the name of this file and leaves them as they are. True: it has refused.
  bool IsRefused(const Training& training, Copy& copy, const std::string& expected,
                 const std::string& file) {
    const Files before = ReadAll(copy.kept.directory);
    const Life life = Live(training, copy.kept, {});
    EXPECT_FALSE(life.died) << life.last;
    if (!absl::StartsWith(life.result, "lost: ")) {
      // A step may have been done again.
      EXPECT_EQ(life.result.substr(0, 64), expected.substr(0, 64));
      return false;
    }
    const std::string named = copy.PathOf(file.substr(0, file.rfind('.')));
    EXPECT_THAT(life.result,
                AllOf(HasSubstr(named.substr(0, named.rfind('_'))), Not(HasSubstr("\n"))));
    EXPECT_EQ(ReadAll(copy.kept.directory), before);
    return true;
  }
};

TEST_F(LeftFiles, AreAllThereOrTheJobIsRefusedUntilTheyAre) {
  Training training = Small();
  training.steps = 3;
  training.micro_steps = 4;
  training.pins = true;
  std::set<std::string> refused;
  std::set<std::string> not_needed;
  for (const bool keeps_previous : {false, true}) {
    training.spec.keep_previous = keeps_previous;
    training.spec.update_mode = keeps_previous ? UpdateMode::kWait : UpdateMode::kSpeculate;
    const std::string expected = Undisturbed(training);
    for (uint64_t at = 90;; at += kSanitized ? 1461 : 73) {
      const DirectoryInMemory directory;
      Kept left;
      left.directory = directory.path();
      if (!Live(training, left, {.at_store = at}).died) break;
      for (const auto& [file, contents] : ReadAll(directory.path())) {
        SCOPED_TRACE(absl::StrCat(file, " after store ", at));
        Copy copy(directory.path());
        const std::string away = copy.directory.outside() + "/away";
        std::filesystem::rename(copy.PathOf(file), away);
        const bool is_refused = IsRefused(training, copy, expected, file);
        (is_refused ? refused : not_needed).insert(KindOf(file));
        if (!is_refused) continue;
        std::filesystem::rename(away, copy.PathOf(file));
        EXPECT_EQ(Live(training, copy.kept, {}).result, expected);
        if (HasFailure()) return;
      }
    }
  }
  if (kSanitized) return;  // Too few deaths to see them all.
  EXPECT_THAT(refused, testing::IsSupersetOf({"identity", "record", "table", "state", "ledger",
                                              "redo", "sums", "gradients", "accumulators",
                                              "previous_versions", "versions"}));
  // Free slots; and what ranks said of a step that is done again.
  EXPECT_THAT(not_needed, testing::IsSubsetOf({"versions", "second_versions", "log"}));
}

// What ranks were told that it had been taken, they need not have any more.
TEST_F(LeftFiles, WithoutWhatRanksSaidHaveTheStepDoneAgain) {
  const Training training = Small();
  const std::string expected = Undisturbed(training);
  Copy copy;
  ASSERT_TRUE(Live(training, copy.kept, {.at_store = 1, .kind = "a ledger's word"}).died);
  for (const auto& [file, contents] : ReadAll(copy.kept.directory)) {
    if (KindOf(file) == "log") std::filesystem::remove(copy.PathOf(file));
  }
  const Life life = Live(copy.kept, {}, [&](Engine& engine) {
    return absl::StrCat(Worker(engine, training).Train().substr(0, 64), told_at_the_start.at(0));
  });
  EXPECT_EQ(life.result.substr(0, 64), expected.substr(0, 64));
  EXPECT_THAT(life.result, testing::ContainsRegex("its step 1 is done again by its ranks: the file "
                                                  "/.*\\.log\\* is missing, or not as it was"));
}

TEST_F(LeftFiles, HaveNoLaneOfAnUpdateThatIsNone) {
  const Training training = Small();
  const std::string expected = Undisturbed(training);
  const DirectoryInMemory directory;
  std::optional<LaneInUse> lane;
  Leave(training, directory, [&](const Files& files) {
    lane = FindLane(files, "redo");
    return lane.has_value();
  });
  ASSERT_FALSE(HasFailure());
  for (const auto& [word, tag] : WrongLanes(*lane)) {
    Copy copy(directory.path(), *lane, word, tag);
    EXPECT_TRUE(IsRefused(training, copy, expected, lane->file));
  }
}

// Nothing is decided of it, so the step is done again.
TEST_F(LeftFiles, HaveNoLaneOfASumThatIsNone) {
  Training training = Small();
  training.micro_steps = 3;
  const std::string expected = Undisturbed(training);
  const DirectoryInMemory directory;
  Kept kept;
  kept.directory = directory.path();
  ASSERT_TRUE(Live(training, kept, {.at_store = 1, .kind = "a turn of a sum"}).died);
  const std::optional<LaneInUse> lane = FindLane(ReadAll(directory.path()), "sums");
  ASSERT_TRUE(lane.has_value());
  for (const auto& [word, tag] : WrongLanes(*lane)) {
    Copy copy(directory.path(), *lane, word, tag);
    const Life life = Live(copy.kept, {}, [&](Engine& engine) {
      return absl::StrCat(Worker(engine, training).Train().substr(0, 64), told_at_the_start.at(0));
    });
    EXPECT_EQ(life.result.substr(0, 64), expected.substr(0, 64)) << life.last;
    EXPECT_THAT(life.result,
                AllOf(HasSubstr("its step 1 is done again by its ranks: the file "),
                      HasSubstr(copy.PathOf(lane->file)), HasSubstr("is not as it was stored")));
  }
}

TEST_F(LeftFiles, HaveNoSlotsBesidesThoseOfABatch) {
  Training training = Small();
  training.steps = 3;
  training.pins = true;
  const std::string expected = Undisturbed(training);
  std::string file;
  const DirectoryInMemory directory;
  // One of its slots is a chunk's.
  const std::string left = Leave(training, directory, [&](const Files& files) {
    bool is_used = false;
    for (const auto& [name, contents] : files) {
      if (KindOf(name) == "versions") file = name;
      if (KindOf(name) != "table") continue;
      std::vector<uint64_t> words(contents.size() / sizeof(uint64_t));
      std::memcpy(words.data(), contents.data(), contents.size());
      std::erase(words, uint64_t{0});
      is_used = std::any_of(words.begin(), words.end(), [&](uint64_t word) {
        return (word & ((uint64_t{1} << SlotPool::kNumberBits) - 1)) >= 3 * words.size();
      });
    }
    return is_used;
  });
  ASSERT_FALSE(HasFailure());
  const std::string whole = ReadAll(left)[file];
  uint32_t slots = 0;
  std::memcpy(&slots, whole.data() + sizeof(uint64_t), sizeof(slots));
  ASSERT_GT(slots, 0u);
  int refused = 0;
  const size_t bytes = 2 * sizeof(uint64_t) + slots * sizeof(uint32_t);
  constexpr size_t kStride = kSanitized ? 101 : 11;
  for (size_t bit = 0; bit < 8 * bytes; bit += kStride) {
    Copy copy(left);
    std::fstream out(copy.PathOf(file), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(bit / 8));
    out.put(static_cast<char>(whole[bit / 8] ^ (1 << bit % 8)));
    out.close();
    SCOPED_TRACE(absl::StrCat("bit ", bit));
    refused += IsRefused(training, copy, expected, file) ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GE(refused, static_cast<int>(8 * bytes / kStride) - 2);
}

// The record says so; then it goes, the last of all.
TEST_F(LeftFiles, OfAJobThatWasClosedAreNotMissed) {
  const Training training = Small();
  constexpr int kStride = kSanitized ? 10 : 1;
  int closed = 0;
  for (uint64_t at = 1;; at += kStride) {
    const DirectoryInMemory directory;
    Kept kept;
    kept.directory = directory.path();
    const auto close = [&](Engine& engine) {
      if (!engine.FindJob(training.spec.name).ok()) (void)Worker(engine, training).Train();
      (void)engine.CloseJob(training.spec.name);
      return std::string("closed");
    };
    const Life life = Live(kept, {.at_store = at}, close);
    const Life next = Live(kept, {}, [&](Engine& engine) {
      return std::string(engine.FindJob(training.spec.name).ok() ? "there" : "not there");
    });
    EXPECT_THAT(next.result, testing::AnyOf("there", "not there")) << "after store " << at;
    if (!life.died) break;
    ++closed;
  }
  EXPECT_GE(closed, 80 / kStride);
}

}  // namespace
}  // namespace ballast
