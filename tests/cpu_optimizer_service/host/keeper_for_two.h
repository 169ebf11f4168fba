// Keeps what one process has, for the next one.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_KEEPER_FOR_TWO_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_KEEPER_FOR_TWO_H_

#include <unistd.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/host/file_keeper.h"

namespace ballast {

// Of engines or processes that are used one after the other.
class KeeperForTwo : public FileKeeper {
 public:
  absl::Status Keep(const std::string& name, int descriptor) override {
    kept_[name] = FileDescriptor(dup(descriptor));
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override { kept_.erase(name); }
  std::map<std::string, FileDescriptor> TakeKept() override {
    std::map<std::string, FileDescriptor> taken;
    for (const auto& [name, file] : kept_) taken.emplace(name, FileDescriptor(dup(file.number())));
    return taken;
  }
  const std::map<std::string, FileDescriptor>& kept() const { return kept_; }

 private:
  std::map<std::string, FileDescriptor> kept_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_HOST_KEEPER_FOR_TWO_H_
