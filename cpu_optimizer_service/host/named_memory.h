// Memory with a name, which a keeper holds beyond this process's end. So the next process finds it
// as this one left it, with all stores before the crash.
//
// The memory is files of the keeper: sealed memory files (memfd), or files in a directory on a file
// system in memory. A name consists of a job's uid and a label: "4f6c.../state".
//
// Thread-safe, except that a single arena is its owner's.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_NAMED_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_NAMED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/file_keeper.h"

namespace ballast {

class NamedMemory;

// Whether the system gives this process no more memory (ENOMEM), as any small allocation would find.
bool IsOutOfMemory(const absl::Status& status);

// One mapping of it. Its destructor releases the memory: the keeper drops the name, unless a
// PutsBack is in force.
class NamedArena final : public Arena {
 public:
  ~NamedArena() override;
  NamedArena(const NamedArena&) = delete;
  NamedArena& operator=(const NamedArena&) = delete;

  std::byte* data() override { return data_; }
  int64_t size_bytes() const override { return size_bytes_; }
  const std::string& name() const { return name_; }
  int file_descriptor() const { return file_.number(); }  // Still the arena's.

 private:
  friend class NamedMemory;
  NamedArena(NamedMemory& memory, std::string name, FileDescriptor file, std::byte* data,
             int64_t size_bytes)
      : memory_(memory),
        name_(std::move(name)),
        file_(std::move(file)),
        data_(data),
        size_bytes_(size_bytes) {}

  NamedMemory& memory_;
  const std::string name_;
  FileDescriptor file_;
  std::byte* const data_;
  const int64_t size_bytes_;
};

class NamedMemory {
 public:
  // Borrows the keeper. `available_bytes` returns the available memory of the machine and its
  // control groups.
  explicit NamedMemory(
      FileKeeper& keeper,
      std::function<int64_t()> available_bytes = [] { return AvailableMemoryBytes(); });

  // Zeroed, under a new name. RESOURCE_EXHAUSTED: the system or the keeper has no room.
  absl::StatusOr<std::unique_ptr<NamedArena>> Create(const std::string& name, int64_t bytes,
                                                     ArenaFactory::Touch touch);
  // The same, touched now, in a sealed file that may be given to other processes.
  absl::StatusOr<std::unique_ptr<NamedArena>> CreateShared(const std::string& name, int64_t bytes);
  // Whether that outlives this process wherever other memory does.
  bool KeepsShared() const { return keeper_.keeps_sealed_files(); }
  // RESOURCE_EXHAUSTED, with the wanted and the available bytes: there is no room for the memory
  // that `what`, "job gpt2", is about to create.
  absl::Status Admit(int64_t bytes, absl::string_view what) const;

  // As an earlier process, or this one, left it. NOT_FOUND.
  absl::StatusOr<std::unique_ptr<NamedArena>> Open(const std::string& name);
  // Describes that name for people: FileKeeper::WhatIs.
  std::string WhatIs(const std::string& name) const { return keeper_.WhatIs(name); }
  // What an earlier process left and nobody has opened yet, by name.
  std::vector<std::string> Left() const;
  bool IsLeft(const std::string& name) const;
  int64_t LeftBytes() const;
  // Drops one of those.
  void Forget(const std::string& name);

  // During its life released memory with names of this prefix is put back, as an earlier process
  // left it. An attempt to take it over may lack something that will exist later. Only one at a
  // time.
  class PutsBack {
   public:
    PutsBack(NamedMemory& memory, std::string prefix) : memory_(memory) {
      MutexLock lock(memory_.mutex_);
      memory_.puts_back_ = std::move(prefix);
    }
    ~PutsBack() {
      MutexLock lock(memory_.mutex_);
      memory_.puts_back_.clear();
    }
    PutsBack(const PutsBack&) = delete;
    PutsBack& operator=(const PutsBack&) = delete;

   private:
    NamedMemory& memory_;
  };

  // Descriptors other than memory. Keeps `file`, which stays the caller's, under a new name.
  absl::Status KeepFile(const std::string& name, int file) { return keeper_.Keep(name, file); }
  // Such a descriptor of an earlier process; empty if there is none.
  FileDescriptor TakeFile(const std::string& name);

  // "pages of 4 KiB" or "huge pages", for people: what a new arena gets.
  std::string PagesForPeople();

  // Touches pages with these from now on; nullptr: on the calling thread.
  void UseTasks(TaskPool* tasks) { tasks_ = tasks; }

 private:
  friend class NamedArena;
  absl::StatusOr<std::unique_ptr<NamedArena>> Map(const std::string& name, FileDescriptor file,
                                                  int64_t bytes);
  absl::StatusOr<std::unique_ptr<NamedArena>> MapNew(const std::string& name, FileDescriptor file,
                                                     ArenaFactory::Touch touch);
  // Whether that is requested.
  bool PutBack(NamedArena& arena);
  // Backs all of it with pages. RESOURCE_EXHAUSTED.
  absl::Status Back(const NamedArena& arena);
  absl::Status Fill(const NamedArena& arena) const;
  // Whether all of it lies in huge pages.
  bool MakeHuge(NamedArena& arena);
  absl::Status NoRoom(int64_t bytes, absl::string_view name, const char* call) const;

  FileKeeper& keeper_;
  const std::function<int64_t()> available_bytes_;
  std::atomic<TaskPool*> tasks_ = nullptr;
  mutable Mutex mutex_;
  std::map<std::string, FileDescriptor> left_ ABSL_GUARDED_BY(mutex_);
  std::string puts_back_ ABSL_GUARDED_BY(mutex_);  // Empty: nothing.
};

// The arenas of one owner, a job, as an ArenaFactory. An arena's name is its label without the
// owner's name. An earlier process's arena is opened unchanged. Others are created zeroed, unless
// all must be left.
class NamedArenas final : public ArenaFactory {
 public:
  // `prefix`: the job's uid. `owner`: the labels' prefix, "job gpt2".
  NamedArenas(NamedMemory& memory, std::string prefix, std::string owner)
      : memory_(memory), prefix_(std::move(prefix)), owner_(std::move(owner)) {}

  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override;
  // Only an earlier process's arena. DATA_LOSS: Missing.
  absl::StatusOr<std::unique_ptr<Arena>> Open(int64_t bytes, absl::string_view label);
  // While a job is taken over, none of it is created: Create does what Open does.
  void MustBeLeft(bool must) { must_be_left_ = must; }
  bool must_be_left() const { return must_be_left_; }
  std::string NameOf(absl::string_view label) const;
  // For people.
  std::string WhatIs(absl::string_view label) const { return memory_.WhatIs(NameOf(label)); }
  absl::Status Missing(absl::string_view label) const;
  // Whether an earlier process left one with this label that nobody has opened.
  bool Has(absl::string_view label) const { return memory_.IsLeft(NameOf(label)); }
  // Their labels with this prefix.
  std::vector<std::string> Left(absl::string_view label_prefix) const;
  NamedMemory& memory() const { return memory_; }

 private:
  NamedMemory& memory_;
  const std::string prefix_;
  const std::string owner_;
  bool must_be_left_ = false;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_NAMED_MEMORY_H_
