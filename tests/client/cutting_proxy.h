// A TCP proxy that cuts its connections after a given number of bytes in one direction, or lets
// nothing through.
#ifndef BALLAST_TESTS_CLIENT_CUTTING_PROXY_H_
#define BALLAST_TESTS_CLIENT_CUTTING_PROXY_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// In the test's own process, which says where each cut comes. tests/kill/cutting_proxy.py is for
// whole processes, and draws the instants of its cuts.
class CuttingProxy {
 public:
  struct Budget {
    size_t bytes = 0;
    bool up = true;       // Counts bytes from the client to the service; false: the other way.
    bool silent = false;  // It is accepted, and nothing passes.
  };

  // In front of 127.0.0.1:`port`. Each connection is cut, both ways, when its budget is used up.
  // Connections after the end of the list are not cut.
  CuttingProxy(int port, std::deque<Budget> budgets) : port_(port), budgets_(std::move(budgets)) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(0);
    Check(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
          "the proxy gets a port");
    Check(listen(listener_, 16) == 0, "the proxy listens");
    socklen_t size = sizeof(address);
    Check(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0,
          "the proxy's port is known");
    target_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~CuttingProxy() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    close(listener_);
    for (const auto& connection : connections_) connection->Cut();
    for (std::thread& pump : pumps_) pump.join();
  }

  const std::string& target() const { return target_; }
  int accepted() const {
    MutexLock lock(mutex_);
    return accepted_;
  }
  int cuts() const {
    MutexLock lock(mutex_);
    return cuts_;
  }

 private:
  struct Connection {
    ~Connection() {
      close(client);
      close(service);
    }
    void Cut() const {
      shutdown(client, SHUT_RDWR);
      shutdown(service, SHUT_RDWR);
    }
    int client = -1;
    int service = -1;
  };

  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  void Accept() {
    for (;;) {
      const int client = accept(listener_, nullptr, nullptr);
      if (client < 0) return;
      auto connection = std::make_shared<Connection>();
      connection->client = client;
      {
        MutexLock lock(mutex_);
        ++accepted_;
      }
      connection->service = socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address = Loopback(port_);
      if (connect(connection->service, reinterpret_cast<sockaddr*>(&address), sizeof(address)) !=
          0) {
        continue;
      }
      Budget budget{.bytes = ~size_t{0}};
      if (!budgets_.empty()) {
        budget = budgets_.front();
        budgets_.pop_front();
      }
      const size_t unlimited = ~size_t{0};
      connections_.push_back(connection);
      if (budget.silent) continue;
      pumps_.emplace_back([this, connection, bytes = budget.up ? budget.bytes : unlimited] {
        Pump(*connection, connection->client, connection->service, bytes);
      });
      pumps_.emplace_back([this, connection, bytes = budget.up ? unlimited : budget.bytes] {
        Pump(*connection, connection->service, connection->client, bytes);
      });
    }
  }

  void Pump(const Connection& connection, int from, int to, size_t budget) {
    char buffer[4096];
    for (;;) {
      const ssize_t came = recv(from, buffer, std::min(sizeof(buffer), budget), 0);
      if (came <= 0) break;
      if (send(to, buffer, static_cast<size_t>(came), MSG_NOSIGNAL) != came) break;
      budget -= static_cast<size_t>(came);
      if (budget > 0) continue;
      MutexLock lock(mutex_);
      ++cuts_;
      break;
    }
    connection.Cut();
  }

  const int port_;
  int listener_ = -1;
  std::string target_;
  // Used by the acceptor's thread, and by the destructor after it.
  std::deque<Budget> budgets_;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::vector<std::thread> pumps_;
  mutable Mutex mutex_;
  int accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  int cuts_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread acceptor_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_CUTTING_PROXY_H_
