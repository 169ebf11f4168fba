// Memory with a name, which a keeper holds beyond this process's death, so that the next process
// finds it as this one left it: a process dies between two of its stores, and what it had stored
// before is there.
//
// The memory is that of files that the keeper makes: sealed memory files (memfd), or files in a
// directory on a file system in memory. Names are made of a job's uid and what the memory is:
// "4f6c.../state".
//
// Thread-safe, but for one arena, which is its owner's.
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

// One mapping of it. Destroyed, it gives the memory up: the keeper drops the name, unless a
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
  // Borrows the keeper. `available_bytes` says what the machine and its control groups have left.
  explicit NamedMemory(
      FileKeeper& keeper,
      std::function<int64_t()> available_bytes = [] { return AvailableMemoryBytes(); });

  // Zeroed, under a name that is new. RESOURCE_EXHAUSTED: the system or the keeper has no room.
  absl::StatusOr<std::unique_ptr<NamedArena>> Create(const std::string& name, int64_t bytes,
                                                     ArenaFactory::Touch touch);
  // The same, touched now, of a sealed file that other processes may be given.
  absl::StatusOr<std::unique_ptr<NamedArena>> CreateShared(const std::string& name, int64_t bytes);
  // Whether that outlives this process wherever other memory does.
  bool KeepsShared() const { return keeper_.keeps_sealed_files(); }
  // RESOURCE_EXHAUSTED, with what is wanted and what there is: there is no room for so much more,
  // which `what`, "job gpt2", is about to create.
  absl::Status Admit(int64_t bytes, absl::string_view what) const;

  // As an earlier process left it, or this one. NOT_FOUND.
  absl::StatusOr<std::unique_ptr<NamedArena>> Open(const std::string& name);
  // Of that name, for people: FileKeeper::WhatIs.
  std::string WhatIs(const std::string& name) const { return keeper_.WhatIs(name); }
  // What an earlier process left and nobody has opened yet, by name.
  std::vector<std::string> Left() const;
  bool IsLeft(const std::string& name) const;
  int64_t LeftBytes() const;
  // Gives up one of those.
  void Forget(const std::string& name);

  // While there is one, what is given up of names that begin so is left again, as an earlier process
  // left it: an attempt to take it over may fail for want of something that will be there later.
  // One at a time.
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

  // Descriptors that are no memory. Keeps `file`, which stays the caller's, under a new name.
  absl::Status KeepFile(const std::string& name, int file) { return keeper_.Keep(name, file); }
  // What an earlier process kept so; none: an empty one.
  FileDescriptor TakeFile(const std::string& name);

  // "pages of 4 KiB" or "huge pages", for people: what an arena gets that is made for this.
  std::string PagesForPeople();

  // Makes pages ready with these from now on; nullptr: none.
  void UseTasks(TaskPool* tasks) { tasks_ = tasks; }

 private:
  friend class NamedArena;
  absl::StatusOr<std::unique_ptr<NamedArena>> Map(const std::string& name, FileDescriptor file,
                                                  int64_t bytes);
  absl::StatusOr<std::unique_ptr<NamedArena>> MapNew(const std::string& name, FileDescriptor file,
                                                     ArenaFactory::Touch touch);
  // Whether that is asked for.
  bool PutBack(NamedArena& arena);
  // Backs all of it with pages. RESOURCE_EXHAUSTED.
  absl::Status Back(const NamedArena& arena);
  absl::Status Fill(const NamedArena& arena) const;
  // Whether all of it is there in huge pages.
  bool MakeHuge(NamedArena& arena);
  absl::Status NoRoom(int64_t bytes, absl::string_view name, const char* call) const;

  FileKeeper& keeper_;
  const std::function<int64_t()> available_bytes_;
  std::atomic<TaskPool*> tasks_ = nullptr;
  mutable Mutex mutex_;
  std::map<std::string, FileDescriptor> left_ ABSL_GUARDED_BY(mutex_);
  std::string puts_back_ ABSL_GUARDED_BY(mutex_);  // Empty: nothing.
};

// The arenas of one owner, a job, as an ArenaFactory: its label, without the owner's name in front,
// makes the name. One that an earlier process left is opened as it is, others are created zeroed,
// unless all must be left.
class NamedArenas final : public ArenaFactory {
 public:
  // `prefix`: the job's uid. `owner`: what labels begin with, "job gpt2".
  NamedArenas(NamedMemory& memory, std::string prefix, std::string owner)
      : memory_(memory), prefix_(std::move(prefix)), owner_(std::move(owner)) {}

  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override;
  // Only as an earlier process left it. DATA_LOSS: Missing.
  absl::StatusOr<std::unique_ptr<Arena>> Open(int64_t bytes, absl::string_view label);
  // While a job is taken over nothing of it is made again: Create does what Open does.
  void MustBeLeft(bool must) { must_be_left_ = must; }
  bool must_be_left() const { return must_be_left_; }
  std::string NameOf(absl::string_view label) const;
  // For people.
  std::string WhatIs(absl::string_view label) const { return memory_.WhatIs(NameOf(label)); }
  absl::Status Missing(absl::string_view label) const;
  // Whether an earlier process left one of this label, that nobody has opened.
  bool Has(absl::string_view label) const { return memory_.IsLeft(NameOf(label)); }
  // The labels of those that begin so.
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
