// How a communicator waits for NCCL and ends, with a library that returns what a test sets.
#include "gpu_worker/cuda/nccl_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

namespace ballast::worker {
namespace {

using testing::HasSubstr;

// The library's functions take no context, so what they know is one test's at a time.
struct Library {
  std::atomic<int> in_progress = 0;                  // Answers of that kind before the state.
  std::atomic<ncclResult_t> state = ncclSuccess;     // The communicator's.
  std::atomic<ncclResult_t> finalize = ncclSuccess;  // What the call returns.
  std::atomic<int> asked = 0;
  std::atomic<int> destroyed = 0;
  std::atomic<int> aborted = 0;
} library;

const Nccl kFunctions = {
    .CommInitRankConfig =
        [](ncclComm_t* communicator, int, ncclUniqueId, int, ncclConfig_t* config) {
          EXPECT_EQ(config->blocking, 0);
          *communicator = reinterpret_cast<ncclComm_t>(&library);
          return ncclInProgress;
        },
    .CommGetAsyncError =
        [](ncclComm_t, ncclResult_t* state) {
          ++library.asked;
          *state = library.in_progress-- > 0 ? ncclInProgress : library.state.load();
          return ncclSuccess;
        },
    .CommFinalize = [](ncclComm_t) { return library.finalize.load(); },
    .CommDestroy =
        [](ncclComm_t) {
          ++library.destroyed;
          return ncclSuccess;
        },
    .CommAbort =
        [](ncclComm_t) {
          ++library.aborted;
          return ncclSuccess;
        },
    .GetErrorString = [](ncclResult_t) -> const char* { return "remote process exited"; },
    .GetLastError = [](ncclComm_t) -> const char* { return "rank 3"; },
};

class NcclCommunicatorTest : public testing::Test {
 protected:
  void SetUp() override {
    library.in_progress = 0;
    library.state = library.finalize = ncclSuccess;
    library.asked = library.destroyed = library.aborted = 0;
  }
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      absl::Duration timeout = absl::Seconds(30)) {
    return NcclCommunicator::Connect(kFunctions, {}, 0, 4, timeout);
  }
  static absl::Status Do(NcclCommunicator& communicator, ncclResult_t result) {
    return communicator.Do([=](const Nccl&, ncclComm_t) { return result; });
  }
};

constexpr int kForever = 1 << 30;

TEST_F(NcclCommunicatorTest, ACallThatIsDoneAtOnceAsksForNothing) {
  const auto communicator = Connect().value();
  const int before = library.asked;
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(Do(*communicator, ncclSuccess).ok());
  EXPECT_EQ(library.asked, before);
}

TEST_F(NcclCommunicatorTest, ACallInProgressIsWaitedForAndNoLonger) {
  const auto communicator = Connect().value();
  library.asked = 0;
  library.in_progress = 5;
  EXPECT_TRUE(Do(*communicator, ncclInProgress).ok());
  EXPECT_EQ(library.asked, 6);
}

TEST_F(NcclCommunicatorTest, AnErrorOfTheCallOrOfItsProgressIsInTheLibrarysWords) {
  const auto communicator = Connect().value();
  const absl::Status at_once = Do(*communicator, ncclInvalidArgument);
  library.state = ncclRemoteError;
  const absl::Status later = Do(*communicator, ncclInProgress);
  for (const absl::Status& status : {at_once, later, communicator->AsyncError()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("remote process exited (rank 3)"));
  }
  library.state = ncclSuccess;
}

TEST_F(NcclCommunicatorTest, WorkInProgressIsNoError) {
  const auto communicator = Connect().value();
  library.in_progress = 1;
  EXPECT_TRUE(communicator->AsyncError().ok());
}

TEST_F(NcclCommunicatorTest, RanksThatDoNotComeAreNotWaitedForLongerThanAsked) {
  library.in_progress = kForever;
  library.finalize = ncclInvalidArgument;  // As of one whose beginning is in progress.
  const absl::Status status = Connect(absl::Milliseconds(20)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("see which of them"));
  EXPECT_EQ(library.aborted, 1);
  EXPECT_EQ(library.destroyed, 0);
}

TEST_F(NcclCommunicatorTest, AnAbortEndsTheWaitOfAnotherThread) {
  const auto communicator = Connect(absl::Hours(1)).value();
  library.in_progress = kForever;
  library.asked = 0;
  std::thread waiter(
      [&] { EXPECT_EQ(Do(*communicator, ncclInProgress).code(), absl::StatusCode::kUnavailable); });
  while (library.asked == 0) std::this_thread::yield();
  communicator->Abort();
  waiter.join();
  communicator->Abort();  // Once is enough.
  EXPECT_EQ(library.aborted, 1);
  EXPECT_FALSE(Do(*communicator, ncclSuccess).ok());
}

TEST_F(NcclCommunicatorTest, EndsTogetherWithTheOthersOrByItself) {
  Connect().value().reset();
  EXPECT_EQ(library.destroyed, 1);
  EXPECT_EQ(library.aborted, 0);
  library.finalize = ncclSystemError;
  Connect().value().reset();
  EXPECT_EQ(library.destroyed, 1);
  EXPECT_EQ(library.aborted, 1);
}

}  // namespace
}  // namespace ballast::worker
