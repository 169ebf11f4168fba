// The files of the status page, which are part of the program.
#ifndef BALLAST_SERVER_STATUS_PAGE_H_
#define BALLAST_SERVER_STATUS_PAGE_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::server {

struct PageFile {
  absl::string_view path;  // "/" or "/page.css".
  absl::string_view content_type;
  absl::string_view contents;
};
// Made of the files in page/ (embed_page.cmake).
absl::Span<const PageFile> PageFiles();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_PAGE_H_
