#include "server/ballastd/service_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

// A manager that listens, and says so in the environment. `watchdog_microseconds`: until it would end the process.
class Manager {
 public:
  explicit Manager(int watchdog_microseconds = 80'000)
      : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    const std::string address = absl::StrCat("@service_manager_test_", getpid());
    std::memcpy(name.sun_path + 1, address.data() + 1, address.size() - 1);
    EXPECT_EQ(bind(socket_.number(), reinterpret_cast<const sockaddr*>(&name),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size())),
              0);
    setenv("NOTIFY_SOCKET", address.c_str(), 1);
    setenv("WATCHDOG_USEC", std::to_string(watchdog_microseconds).c_str(), 1);
  }
  ~Manager() {
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
  }
  std::string NextTold() {
    char text[256];
    const ssize_t bytes = recv(socket_.number(), text, sizeof(text), 0);
    return std::string(text, std::max<ssize_t>(bytes, 0));
  }

 private:
  FileDescriptor socket_;
};

TEST(ServiceManager, TellsThatAServiceLivesThatIsNotReadyForLong) {
  Manager manager;
  const auto service = ServiceManager::FromEnvironment().value();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(manager.NextTold(), "WATCHDOG=1");
}

TEST(ServiceManagerDeathTest, EndsAServiceThatIsReadyAndThenStuck) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Manager manager;
        const auto service = ServiceManager::FromEnvironment().value();
        service->Ready("listening");
        while (true) pause();
      },
      testing::KilledBySignal(SIGABRT), "ballastd: the service is stuck");
}

TEST(ServiceManager, LeavesAServiceThatKeepsAlive) {
  constexpr int kMicroseconds = 4'000'000;  // So that a busy machine does not make it silent.
  Manager manager(kMicroseconds);
  const auto service = ServiceManager::FromEnvironment().value();
  EXPECT_LE(service->keep_alive_interval(), absl::Microseconds(kMicroseconds) / 4);
  service->Ready("listening");
  // The thread tells eight times in the watchdog's time, and ends what is silent for six.
  for (int told = 0; told < 8;) {
    if (manager.NextTold() == "WATCHDOG=1") ++told;
    service->KeepAlive();
  }
}

TEST(ServiceManager, WithoutAManagerNothingHappens) {
  const auto service = ServiceManager::FromEnvironment().value();
  service->Ready("listening");
  service->Saving("saving");
  service->KeepAlive();
  service->StopRefused("not stopped");
  service->Stopping("stopped");
}

}  // namespace
}  // namespace ballast::server
