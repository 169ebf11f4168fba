#include "tests/histories/engine/deaths.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "tests/histories/engine/frozen_threads.h"
#include "tests/support/sanitizers.h"

namespace ballast::histories {

bool CanDie() { return !BALLAST_TSAN; }

// One process's. Thread-safe.
class Deaths::Keeper final : public FileKeeper {
 public:
  explicit Keeper(std::map<std::string, FileDescriptor> left) : kept_(std::move(left)) {}

  absl::Status Keep(const std::string& name, int descriptor) override {
    MutexLock lock(mutex_);
    kept_[name] = FileDescriptor(dup(descriptor));
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override {
    MutexLock lock(mutex_);
    kept_.erase(name);
  }
  std::map<std::string, FileDescriptor> TakeKept() override {
    MutexLock lock(mutex_);
    std::map<std::string, FileDescriptor> taken;
    for (const auto& [name, file] : kept_) taken.emplace(name, FileDescriptor(dup(file.number())));
    return taken;
  }

  // All of it as it is at one instant, at which `dead` becomes true.
  std::map<std::string, FileDescriptor> Freeze(std::atomic<bool>& dead) {
    MutexLock lock(mutex_);
    struct Copy {
      void* from;
      void* to;
      size_t bytes;
    };
    std::map<std::string, FileDescriptor> copied;
    std::vector<Copy> copies;
    for (const auto& [name, file] : kept_) {
      struct stat facts = {};
      Check(fstat(file.number(), &facts) == 0, "a kept file has a size");
      const auto bytes = static_cast<size_t>(facts.st_size);
      FileDescriptor to = MakeSealedFile("copy", facts.st_size).value();
      if (bytes > 0) {
        copies.push_back(
            {Map(file, PROT_READ, bytes), Map(to, PROT_READ | PROT_WRITE, bytes), bytes});
      }
      copied.emplace(name, std::move(to));
    }
    {
      const FrozenThreads frozen;
      for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
      dead = true;
    }
    for (const Copy& copy : copies) {
      munmap(copy.from, copy.bytes);
      munmap(copy.to, copy.bytes);
    }
    return copied;
  }

 private:
  static void* Map(const FileDescriptor& file, int protection, size_t bytes) {
    // Every page is there beforehand: nothing but copying is done while all else stands still.
    void* const data =
        mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE, file.number(), 0);
    Check(data != MAP_FAILED, "a kept file can be mapped");
    return data;
  }

  Mutex mutex_;
  std::map<std::string, FileDescriptor> kept_ ABSL_GUARDED_BY(mutex_);
};

Deaths::Deaths() : seam_([this](const char* what) { OnStore(what); }) {
  Begin();
  store_seam = &seam_;
}

Deaths::~Deaths() { store_seam = nullptr; }

FileKeeper& Deaths::keeper() { return *keeper_; }

std::map<std::string, int64_t> Deaths::TakeCounts() {
  MutexLock lock(mutex_);
  return std::exchange(counts_, {});
}

void Deaths::Begin() {
  MutexLock lock(mutex_);
  keeper_ = std::make_unique<Keeper>(std::exchange(left_, {}));
  dead_ = std::make_shared<std::atomic<bool>>(false);
}

void Deaths::Arm(int stores, int next) {
  MutexLock lock(mutex_);
  stores_left_ = CanDie() ? stores : 0;
  next_ = next;
}

void Deaths::Disarm() {
  MutexLock lock(mutex_);
  stores_left_ = next_ = 0;
}

void Deaths::Expose() {
  MutexLock lock(mutex_);
  exposed_ = stores_left_ > 0;
}

// Waits for a death that is under way.
bool Deaths::Hide() {
  MutexLock lock(mutex_);
  exposed_ = false;
  return *dead_;
}

void Deaths::OnStore(const char* what) {
  if (!exposed_) return;
  MutexLock lock(mutex_);
  if (!exposed_ || *dead_ || --stores_left_ > 0) return;
  left_ = keeper_->Freeze(*dead_);
  ++counts_[what];
  exposed_ = false;
  stores_left_ = std::exchange(next_, 0);
  if (on_death_ != nullptr) on_death_();
}

}  // namespace ballast::histories
