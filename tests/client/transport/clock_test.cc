// Waits do not follow a host's clock that is set, and time in which this process did not run
// does not use up a limit. The wall clock of this process is the test's: it moves it.
#include "client/transport/clock.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "client/connect.h"
#include "client/session/retry.h"
#include "proto/deadline.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"

namespace {

std::atomic<int64_t> wall_offset_seconds = 0;

}  // namespace

// In place of the C library's, for all of this binary and the libraries that it loads.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += wall_offset_seconds.load();
  return result;
}

extern "C" int gettimeofday(timeval* time, void*) noexcept {
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

namespace ballast::client {
namespace {

class ClockTest : public testing::Test {
 protected:
  ~ClockTest() override { wall_offset_seconds = 0; }
};

TEST_F(ClockTest, SettingTheWallClockMovesNoDeadline) {
  for (const int64_t jump : {-600, 600}) {
    wall_offset_seconds = 0;
    const auto wall = std::chrono::system_clock::now();
    Backoff backoff(Clock::Real(), Clock::Real().Now() + absl::Seconds(60));
    const auto deadline = proto::Deadline(absl::Seconds(60));
    wall_offset_seconds = jump;
    ASSERT_GT(std::chrono::abs(std::chrono::system_clock::now() - wall), std::chrono::seconds(500))
        << "the test does not move the clock";
    EXPECT_GT(backoff.left(), absl::Seconds(10)) << jump;
    EXPECT_LE(backoff.left(), absl::Seconds(60)) << jump;
    const gpr_timespec left = gpr_time_sub(
        deadline, gpr_convert_clock_type(gpr_now(GPR_CLOCK_MONOTONIC), deadline.clock_type));
    EXPECT_GT(left.tv_sec, 10) << jump;
    EXPECT_LE(left.tv_sec, 60) << jump;
  }
}

constexpr char kAddress[] = "BALLAST_CLOCK_TEST_ADDRESS";
constexpr absl::Duration kLimit = absl::Seconds(15);

// Run by the next test, in a process that it pauses.
TEST(PausedProcess, DISABLED_Connects) {
  const char* const address = std::getenv(kAddress);
  ASSERT_NE(address, nullptr);
  ASSERT_EQ(write(STDOUT_FILENO, "!", 1), 1);
  const absl::Status connected = Connect(address, kLimit).status();
  EXPECT_TRUE(connected.ok()) << connected;
}

TEST(PausedProcess, APauseDoesNotUseUpTheLimitOfConnecting) {
  const std::string path = "/tmp/ballast_clock_test_" + std::to_string(getpid());
  Process child({"/usr/bin/env", "-i", std::string(kAddress) + "=unix:" + path,
                 std::filesystem::read_symlink("/proc/self/exe").string(),
                 "--gtest_filter=PausedProcess.DISABLED_Connects",
                 "--gtest_also_run_disabled_tests"});
  while (child.Output().find('!') == std::string::npos) {
    ASSERT_TRUE(child.IsRunning()) << child.Errors();
    absl::SleepFor(absl::Milliseconds(1));
  }
  absl::SleepFor(absl::Milliseconds(100));  // It waits by now, or soon.
  child.Signal(SIGSTOP);
  absl::SleepFor(kLimit + absl::Milliseconds(100));
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
  v1::JobService::Service service;
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  EXPECT_NE(server, nullptr);
  child.Signal(SIGCONT);
  EXPECT_EQ(child.ExitCode(), 0) << child.Output();
  server->Shutdown();
  unlink(path.c_str());
}

TEST(Connect, NamesTheAddressAndWhatToDo) {
  const absl::Status status = Connect("127.0.0.1:1", absl::Milliseconds(200)).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ballast::client
