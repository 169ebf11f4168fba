#include "server/status/status_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/status/page_messages.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// The whole answer, its head included; empty if there was none.
std::string GetOnce(const std::string& address, const std::string& path) {
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  to.sin_port = htons(static_cast<uint16_t>(port));
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(connection, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: localhost\r\n\r\n");
  (void)send(connection, request.data(), request.size(), MSG_NOSIGNAL);
  std::string answer;
  char part[4096];
  for (ssize_t bytes = 0; (bytes = read(connection, part, sizeof(part))) > 0;) {
    answer.append(part, bytes);
  }
  close(connection);
  return answer;
}

// The server leaves a peer whose request is not there within two seconds: then it asks again.
std::string Get(const std::string& address, const std::string& path) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  std::string answer;
  do {
    answer = GetOnce(address, path);
  } while (answer.empty() && std::chrono::steady_clock::now() < limit);
  return answer;
}

TEST(StatusServer, LivesWhileJobsAreTakenOverAndIsReadyAfterwards) {
  const auto status = StatusServer::Start({.listen = "127.0.0.1:0"});
  ASSERT_TRUE(status.ok()) << status.status();
  const std::string& address = (*status)->url();
  EXPECT_THAT(Get(address, "/live"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get(address, "/"), StartsWith("HTTP/1.1 200 "));
  for (const std::string path :
       {"/ready", "/metrics", "/api/service", "/api/jobs", "/api/job?job=a"}) {
    const std::string answer = Get(address, path);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 503 ")) << path;
    EXPECT_TRUE(Says(absl::StripSuffix(answer.substr(answer.find("\r\n\r\n") + 4), "\n")));
  }
  EXPECT_THAT(Get(address, "/nothing"), StartsWith("HTTP/1.1 404 "));

  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  const auto server = Server::Start(engine, {.listen = {}});
  ASSERT_TRUE(server.ok()) << server.status();
  (*status)->Show(engine, **server, {.deaths = 3, .recovery_seconds = 0.25});
  EXPECT_THAT(Get(address, "/ready"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get(address, "/metrics"), HasSubstr("\nballast_child_deaths_total 3\n"));
  EXPECT_THAT(Get(address, "/metrics"), HasSubstr("\nballast_recovery_seconds 0.25\n"));
  // Scrapes that come one upon the other are answered together, and cost as much as one.
  bool together = false;
  for (int i = 0; i < 100 && !together; ++i) {
    const std::string before = Get(address, "/metrics");
    (*server)->SetServing(i % 2 != 0);
    together = Get(address, "/metrics") == before;
  }
  EXPECT_TRUE(together);
  (*server)->SetServing(false);
  EXPECT_THAT(Get(address, "/ready"), StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(Get(address, "/live"), StartsWith("HTTP/1.1 200 "));
}

TEST(PageMessages, OfManyRanksThoseThatOthersWaitForAreShown) {
  constexpr int kRanks = 300;
  constexpr int kElements = kRanks * kBlockElements;
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{kElements}},
                                        .world_size = kRanks,
                                        .bucket_elements = kElements,
                                        .chunk_elements = kBlockElements}));
  driver.UploadWeights();
  driver.AttachAll();
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  for (int rank = 0; rank + 1 < kRanks; ++rank) ASSERT_FALSE(driver.Seal(rank, 1).has_value());
  const v1::Job job = JobMessage(engine, driver.job());
  EXPECT_EQ(job.ranks_size(), 256);
  EXPECT_EQ(job.ranks(0).rank(), kRanks - 1);
  EXPECT_EQ(job.ranks(1).rank(), 0);
  EXPECT_EQ(job.attached_ranks(), kRanks);
  const v1::ListJobsResponse jobs = JobsMessage(engine, {});
  ASSERT_EQ(jobs.jobs_size(), 1);
  ASSERT_EQ(jobs.jobs(0).ranks_size(), 1);
  EXPECT_EQ(jobs.jobs(0).ranks(0).rank(), kRanks - 1);
}

}  // namespace
}  // namespace ballast::server
