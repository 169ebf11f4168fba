# cpack -G DEB, in the build folder: ballastd, ballast, ballast-worker, libballast1 and libballast-dev. The target
# `packages` builds what they consist of, and no more, and puts them into build/packages.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ballast)
set(CPACK_PACKAGE_VENDOR "The Ballast authors")
set(CPACK_PACKAGE_CONTACT "The Ballast authors <no-reply@ballast.example>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Optimizer service for training on CPU hosts")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL service cli worker library development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE gzip)

set(changelog ${CMAKE_CURRENT_BINARY_DIR}/changelog.Debian.gz)
set(debian_version ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS debian/changelog)
file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/debian/changelog newest LIMIT_COUNT 1)
if(NOT newest MATCHES "^ballast \\(${debian_version}\\) ")
  message(FATAL_ERROR "deploy/debian/changelog begins with '${newest}', and the version is ${debian_version}")
endif()
execute_process(COMMAND gzip -9n --stdout ${CMAKE_CURRENT_SOURCE_DIR}/debian/changelog OUTPUT_FILE ${changelog}
  COMMAND_ERROR_IS_FATAL ANY)

# ballast_package(component name text [depends]): the text's first line is the summary.
function(ballast_package component name text)
  string(TOUPPER ${component} COMPONENT)
  set(CPACK_DEBIAN_${COMPONENT}_PACKAGE_NAME ${name} PARENT_SCOPE)
  set(CPACK_COMPONENT_${COMPONENT}_DESCRIPTION ${text} PARENT_SCOPE)
  set(CPACK_DEBIAN_${COMPONENT}_PACKAGE_DEPENDS "${ARGN}" PARENT_SCOPE)
  install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/debian/copyright ${changelog}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} COMPONENT ${component})
  set(overrides "# These packages are in no archive that has bugs to close.\ninitial-upload-closes-no-bugs\n")
  set(more ${CMAKE_CURRENT_SOURCE_DIR}/debian/${name}.lintian-overrides)
  if(EXISTS ${more})
    file(READ ${more} own)
    string(APPEND overrides "${own}")
  endif()
  file(CONFIGURE OUTPUT lintian/${name} CONTENT "${overrides}" @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lintian/${name} DESTINATION ${CMAKE_INSTALL_DATADIR}/lintian/overrides
    COMPONENT ${component})
endfunction()

ballast_package(service ballastd "Optimizer service for training: the service
Holds the fp32 master weights and the optimizer state of training runs, takes
gradients and streams updated weights back. Runs under systemd as the user
ballast." "adduser, init-system-helpers (>= 1.52)")
ballast_package(cli ballast "Optimizer service for training: the command line tool
Shows and changes the jobs of a Ballast service.")
ballast_package(worker ballast-worker "Optimizer service for training: a trainer of GPT models
One rank of a training run, which trains through a Ballast service or by
itself.")
ballast_package(library libballast1 "Optimizer service for training: the library for C
What a trainer in C, or in any language that calls C, links to.")
ballast_package(development libballast-dev "Optimizer service for training: headers and libraries
To build trainers in C and C++, with CMake or pkg-config."
  "libballast1 (= ${debian_version}), libgrpc++-dev, protobuf-compiler-grpc, libprotobuf-dev, protobuf-compiler, libabsl-dev, libspdlog-dev, libssl-dev, nlohmann-json3-dev")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)  # Of each package that has a library: CPack knows no other form.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_SOURCE_DIR}/debian/triggers)
foreach(script postinst prerm postrm)
  list(APPEND CPACK_DEBIAN_SERVICE_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_SOURCE_DIR}/debian/${script})
endforeach()
include(CPack)

add_custom_target(packages
  COMMAND ${CMAKE_CPACK_COMMAND} -G DEB -B ${CMAKE_BINARY_DIR}/../packages
  DEPENDS ballastd_page ballast_page ballast-worker_page ballast_shared ballast_client ballast_cluster ballast_proto
          ballast_messages ballast_etcd_messages ballast_common
  WORKING_DIRECTORY ${CMAKE_BINARY_DIR} USES_TERMINAL VERBATIM)
