// `ballast save` against a service whose disk hangs, over a connection that is cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "client/cli/cli_command.h"
#include "tests/client/cutting_proxy.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"
#include "tests/server/tiny_job.h"
#include "tests/support/messages.h"

namespace ballast::client::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Said {
  int exit_code = 0;
  std::string output;
  std::string error;
};

Said Ballast(std::vector<std::string> words, const std::string& service) {
  words.push_back("--service=" + service);
  Said said;
  said.exit_code = Run(words, said.output, said.error);
  return said;
}

TEST(CliSave, ACutConnectionIsSaidToBeOneAndTheSaveGoesOn) {
  SlowDisk disk;
  ServiceForTests service({.listen = {"127.0.0.1:0"}}, &disk);
  server::CreateTinyJob(service, "tiny");
  const std::string address = service.server().addresses()[0];
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  auto proxy = std::make_unique<CuttingProxy>(port, std::deque<CuttingProxy::Budget>());
  disk.HoldUp();
  std::future<Said> save = std::async(std::launch::async, [target = proxy->target()] {
    return Ballast({"save", "tiny", "/checkpoint"}, target);
  });
  disk.AwaitHeldUp();
  proxy.reset();
  const Said said = save.get();
  EXPECT_EQ(said.exit_code, 1);
  EXPECT_TRUE(Says(absl::StripSuffix(said.error, "\n")));

  EXPECT_THAT(Ballast({"job", "tiny"}, address).output,
              AllOf(HasSubstr("saving"), HasSubstr("step 0 to /checkpoint for ")));
  disk.Release();
  const std::shared_ptr<Job> job = service.engine().FindJob("tiny").value();
  while (!job->Status().saves.empty()) std::this_thread::yield();
  EXPECT_TRUE(disk.Exists("/checkpoint/step-0.1/index.json"));
  EXPECT_THAT(Ballast({"job", "tiny"}, address).output, Not(HasSubstr("saving")));
}

TEST(CliSave, InTheBackgroundItReturnsAtOnce) {
  SlowDisk disk;
  ServiceForTests service({.listen = {"127.0.0.1:0"}}, &disk);
  const std::string address = service.server().addresses()[0];
  server::CreateTinyJob(service, "tiny");
  disk.HoldUp();
  const Said said = Ballast({"save", "tiny", "/checkpoint", "--background"}, address);
  EXPECT_THAT(said.output, AllOf(HasSubstr("saving job tiny at step 0 in /checkpoint"),
                                 HasSubstr("`ballast checkpoints /checkpoint`")));
  disk.Release();
  while (Ballast({"checkpoints", "/checkpoint"}, address).exit_code != 0) std::this_thread::yield();
  EXPECT_THAT(Ballast({"checkpoints", "/checkpoint"}, address).output,
              AllOf(HasSubstr("/checkpoint/step-0.1"), HasSubstr("request"), HasSubstr("yes")));
}

}  // namespace
}  // namespace ballast::client::cli
