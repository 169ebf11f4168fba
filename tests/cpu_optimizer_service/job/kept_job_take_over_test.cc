#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/kept/kept_job.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

// As of processes that die: nothing is given up.
class KeeperOfAll final : public KeeperForTwo {
 public:
  void Drop(const std::string& name) override {}
};

class KeptJobTakeOverTest : public testing::Test {
 protected:
  KeptJobTakeOverTest() {
    NamedMemory memory(keeper_);
    KeptJob kept(memory, {.uid = uid_, .spec = MakeJobSpec({})});
    EXPECT_TRUE(kept.Allocate(/*chunks=*/4, /*lanes=*/2).ok());
    EXPECT_TRUE(kept.StoreIdentity().ok());
    record_.committed_step = 7;
    record_.trainer_state = "after 7";
    record_.undone = {.step = 8, .generation = 3};
    EXPECT_TRUE(kept.Store(record_, /*weights_complete=*/true, /*ranks=*/{}).ok());
  }

  // As if a process of another version had stored it.
  void Change(const std::string& label, const std::function<void(std::string&)>& change) {
    NamedMemory memory(keeper_);
    NamedArenas arenas(memory, uid_, "");
    KeptRecord record(arenas, label, 0);
    std::string contents = record.TakeOver().value();
    change(contents);
    ASSERT_TRUE(record.Store(contents).ok());
  }
  static void SetFormat(std::string& contents, uint32_t format) {
    std::memcpy(contents.data(), &format, sizeof(format));
  }
  absl::StatusOr<std::unique_ptr<KeptJob>> TakeOver(NamedMemory& memory) {
    return KeptJob::TakeOver(memory, uid_);
  }
  absl::Status Refusal() {
    NamedMemory memory(keeper_);
    return TakeOver(memory).status();
  }

  KeeperOfAll keeper_;
  const std::string uid_ = std::string(kJobUidCharacters, 'a');
  JobRecord record_;
};

TEST_F(KeptJobTakeOverTest, OfAnotherFormatOrOfNoneIsRefused) {
  for (const std::string label : {"record", "identity"}) {
    std::string before;
    for (const uint32_t format : {uint32_t{0}, kKeptFormat + 1}) {
      Change(label, [&](std::string& contents) {
        before = contents;
        SetFormat(contents, format);
      });
      EXPECT_TRUE(Refused(Refusal(), absl::StatusCode::kFailedPrecondition));
      Change(label, [&](std::string& contents) {
        SetFormat(before, format);
        EXPECT_EQ(contents, before);  // It stays as it was.
        SetFormat(before, kKeptFormat);
        contents = before;
        contents.pop_back();
      });
      EXPECT_EQ(Refusal().code(), absl::StatusCode::kDataLoss);
      Change(label, [&](std::string& contents) { contents = before; });
      EXPECT_TRUE(Refusal().ok());
    }
  }
}

TEST_F(KeptJobTakeOverTest, ThatWasGivenUpIsNone) {
  {
    NamedMemory memory(keeper_);
    const auto kept = TakeOver(memory);
    ASSERT_TRUE(kept.ok()) << kept.status();
    (*kept)->GiveUp();
  }
  EXPECT_EQ(Refusal().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ballast
